"""Why a prompt would or would not be found in the store, block by block. Looks across tenants and models."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from kvstore.identities import KnownIdentity
from kvstore.keys import BlockRef, chain_refs
from kvstore.verify import damage_of
from services.kv.view import Held, StoreView

TokensFor = Callable[[bytes], list[int] | None]


class BlockFate(msgspec.Struct, frozen=True, kw_only=True):
    """`state`: held (and sound), expired, damaged, mismatched, evicted, erased, never_stored, or where the same tokens
    are held instead: other_model, other_tokenizer, other_dtype, other_quantisation, other_block_tokens,
    other_arithmetic, other_format, other_tenant, other_salt. `usable`: a request would find it, since it is held and
    so is everything before it. `end` is the position after the last token."""

    block: int
    start: int
    end: int
    key: str
    tenant: str
    state: str
    tiers: list[str]
    detail: str = ""
    usable: bool = False
    pin: str | None = None
    bytes: int = 0
    expires_at: float | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """`cached_tokens`: what a request for the prompt would report if it came now to a worker that has nothing in
    memory. The last token is always computed."""

    model: str
    build: str
    tenant: str
    salt: str
    prompt_tokens: int
    cached_tokens: int
    blocks: list[BlockFate]


class Question(NamedTuple):
    """`tokens_for(tokenizer_hash)`: the prompt in another tokenizer, None where that is not to be had."""

    known: KnownIdentity
    tenant: str
    salt: str
    token_ids: list[int]
    tokens_for: TokensFor


class _Elsewhere(NamedTuple):
    """The chain that the prompt would have for somebody else."""

    state: str
    detail: str
    refs: list[BlockRef]

    def block_at(self, position: int) -> BlockRef | None:
        return next((ref for ref in self.refs if ref.start <= position < ref.end), None)


class Explainer:
    def __init__(self, view: StoreView, question: Question) -> None:
        self._view = view
        self._question = question
        self._shared = {
            known.identity: view.pins.shared(known.record.model, known.identity.tokenizer_hash)
            for known in view.identities
        }
        self._pinned = view.pinned()
        self._quarantined = {blob.key for tier in view.tiers for blob in tier.quarantined()}
        self._tenants = sorted({tenant for tier in view.tiers for tenant in tier.tenants()})
        self._elsewhere = list(self._others())

    def explain(self) -> Explanation:
        asked = self._question
        refs = self._refs(asked.known, asked.tenant, asked.salt, asked.token_ids)
        fates: list[BlockFate] = []
        for number, ref in enumerate(refs):
            self._view.tick()
            fate = self._fate(number, ref)
            usable = fate.state == "held" and all(before.usable for before in fates[-1:])
            fates.append(msgspec.structs.replace(fate, usable=usable))
        found = sum(fate.end - fate.start for fate in fates if fate.usable)
        return Explanation(
            model=asked.known.record.model,
            build=asked.known.record.build,
            tenant=asked.tenant,
            salt=asked.salt,
            prompt_tokens=len(asked.token_ids),
            cached_tokens=min(found, len(asked.token_ids) - 1),
            blocks=fates,
        )

    def _fate(self, number: int, ref: BlockRef) -> BlockFate:
        held = [Held(tier, entry) for tier in self._view.tiers if (entry := tier.find(ref.name)) is not None]
        whys = {one.tier.name: self._wrong(one, ref) for one in held}
        sound = [one for one in held if not whys[one.tier.name][0]]
        pin = self._pinned.get(ref.name)
        state, detail = ("held", "") if sound else self._missing(ref, list(whys.values()))
        return BlockFate(
            block=number,
            start=ref.start,
            end=ref.end,
            key=ref.key.hex(),
            tenant=ref.tenant,
            state=state,
            detail=detail,
            tiers=[one.tier.name for one in sound],
            pin=None if pin is None else pin.id,
            bytes=max((one.entry.size for one in sound), default=0),
            expires_at=max((one.entry.life.expires_at for one in sound), default=None),
        )

    def _wrong(self, held: Held, ref: BlockRef) -> tuple[str, str]:
        """Why a blob that lies under the block's name would be no hit; ("", "") for a good one."""
        if held.entry.is_expired(self._view.clock()):
            return "expired", "it lies there still, until the next clean-up"
        if why := damage_of(ref.name, held.tier.pieces(ref.name)):
            return "damaged", why
        header = held.entry.header
        if header is not None and (header.token_hash, header.position) != (ref.token_hash, ref.start):
            return "mismatched", "a sound blob of other tokens lies under its name"
        return "", ""

    def _missing(self, ref: BlockRef, whys: list[tuple[str, str]]) -> tuple[str, str]:
        for why in whys:
            return why
        if ref.key in self._quarantined:
            return "damaged", "it was found damaged and moved to quarantine"
        for tier in self._view.tiers:
            if reason := tier.reason_of(ref.name):
                return reason, f"from {tier.name}"
        for other in self._elsewhere:
            theirs = other.block_at(ref.start)
            if theirs is not None and any(tier.find(theirs.name) for tier in self._view.tiers):
                return other.state, other.detail
        return "never_stored", ""

    def _others(self) -> Iterator[_Elsewhere]:
        """Nearest first: other salts and tenants of the same identity, then other identities."""
        asked = self._question
        for salt in {"", asked.salt} - {asked.salt}:
            refs = self._refs(asked.known, asked.tenant, salt, asked.token_ids)
            yield _Elsewhere("other_salt", f"held with {'no salt' if not salt else 'another salt'}", refs)
        for known in self._view.identities:
            ids = self._ids_for(known)
            is_other = known.identity != asked.known.identity
            if ids is None:
                continue
            state, detail = _difference(asked.known, known) if is_other else ("other_tenant", "")
            for tenant in dict.fromkeys([asked.tenant, *self._tenants]):
                if not is_other and tenant == asked.tenant:
                    continue
                whose = f"tenant {tenant}" if tenant != asked.tenant else ""
                for salt in dict.fromkeys([asked.salt, ""]):
                    refs = self._refs(known, tenant, salt, ids)
                    yield _Elsewhere(state, ", ".join(filter(None, [detail, whose])), refs)

    def _ids_for(self, known: KnownIdentity) -> list[int] | None:
        same = known.identity.tokenizer_hash == self._question.known.identity.tokenizer_hash
        return self._question.token_ids if same else self._question.tokens_for(known.identity.tokenizer_hash)

    def _refs(self, known: KnownIdentity, tenant: str, salt: str, ids: list[int]) -> list[BlockRef]:
        identity = known.identity
        shared = self._shared[identity].num_blocks(ids, identity.block_tokens)
        return chain_refs(identity, tenant, salt, ids, shared)


def _difference(ours: KnownIdentity, theirs: KnownIdentity) -> tuple[str, str]:
    """In what another identity differs, the weightiest difference first."""
    a, b = ours.identity, theirs.identity
    if a.fingerprint != b.fingerprint:
        return "other_model", f"held by model {theirs.record.model}, build {theirs.record.build}"
    if a.tokenizer_hash != b.tokenizer_hash:
        return "other_tokenizer", f"held by build {theirs.record.build}, which has another tokenizer"
    for name in ("dtype", "quantisation", "block_tokens"):
        if getattr(a, name) != getattr(b, name):
            return f"other_{name}", f"held with {name} {getattr(theirs.record, name)}"
    if a.arithmetic != b.arithmetic:
        return "other_arithmetic", f"held by arithmetic {theirs.record.arithmetic_name}"
    return "other_format", f"held in format {b.format}"
