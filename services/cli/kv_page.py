"""What `kvrelay kv` prints for people."""

import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from services.cli.durations import shown
from services.cli.printable import on_one_line
from services.kv.explain import BlockFate, Explanation
from services.kv.listing import BlockRow
from services.kv.totals import Total, Totals

KEY_DIGITS = 16
_ROW = "{key:16}  {tier:5}  {tenant:16}  {model:24}  {where:>13}  {kind:18}  {size:>10}  {used:>8}  {left:>8}  {pin}"
HEAD = _ROW.format(
    key="KEY", tier="TIER", tenant="TENANT", model="MODEL", where="TOKENS", kind="STORED AS", size="BYTES",
    used="UNUSED", left="EXPIRES", pin="PIN",
)  # fmt: skip


def line(row: BlockRow) -> str:
    now = time.time()
    return _ROW.format(
        key=row.key[:KEY_DIGITS],
        tier=row.tier,
        tenant=on_one_line(row.tenant),
        model=on_one_line(row.model),
        where=_positions(row.start, row.start + row.tokens) if row.tokens else "?",
        kind=_kind(row),
        size=row.bytes,
        used=shown(max(0.0, now - row.used_at)),
        left="expired" if row.expired else shown(row.expires_at - now),
        pin=row.pin or "",
    ).rstrip()


def page(row: BlockRow) -> str:
    """A line a fact; the last lines are the header as it is stored."""
    return "\n".join(f"{name:18}{text}" for name, text in _facts(row))


def _facts(row: BlockRow) -> Iterator[tuple[str, str]]:
    now = time.time()
    yield "key", row.key
    yield "tier", row.tier
    yield "tenant", on_one_line(row.tenant)
    yield "model", on_one_line(row.model)
    if row.header is None:
        yield "header", "unreadable: `kvrelay kv verify` says why"
    else:
        yield "tokens", f"{row.tokens}, at positions {_positions(row.start, row.start + row.tokens)}"
    if row.payload_bytes is not None:
        yield "size", f"{row.bytes:,} bytes; the payload is {row.payload_bytes:,} before the codec"
    else:
        yield "size", f"{row.bytes:,} bytes"
    yield "last used", f"{_utc(row.used_at)}, {shown(now - row.used_at)} ago" if row.used_at <= now else "pinned"
    yield "expires", f"{_utc(row.expires_at)}, " + ("it has" if row.expired else f"in {shown(row.expires_at - now)}")
    yield "pin", row.pin or "none"
    for name, value in (row.header or {}).items():
        yield f"  {name}", str(value)


def totals(found: Totals) -> str:
    lines = [_TOTAL.format("", "", "BLOCKS", "BYTES", "TOKENS", "RATIO"), _total("all", "", found.all)]
    for group, values in found.groups.items():
        lines += [_total(group if n == 0 else "", value, total) for n, (value, total) in enumerate(values.items())]
    lines += [_total(name, "", getattr(found, name)) for name in ("pinned", "expired", "unreadable")]
    lines.append(
        f"\n{found.quarantined_blocks} blocks ({found.quarantined_bytes:,} bytes) in quarantine, {found.pins} pins"
    )
    if found.damaged_pins:
        lines.append(f"{found.damaged_pins} pins are damaged and do not count: `kvrelay kv verify` names them")
    return "\n".join(lines)


_TOTAL = "{:14}{:26}{:>12}{:>18}{:>14}{:>8}"


def _total(name: str, value: str, total: Total) -> str:
    ratio = f"{total.ratio:.2f}" if total.ratio else "-"
    return _TOTAL.format(name, on_one_line(value), total.blocks, f"{total.bytes:,}", f"{total.tokens:,}", ratio)


_FATE = "{:>5}  {:>13}  {:16}  {:20}  {}"


def explanation(found: Explanation) -> Iterable[str]:
    yield f"model {found.model}, build {found.build}, tenant {found.tenant}" + (", with a salt" if found.salt else "")
    yield _FATE.format("BLOCK", "TOKENS", "KEY", "STATE", "").rstrip()
    for fate in found.blocks:
        words = _FATE.format(
            fate.block, _positions(fate.start, fate.end), fate.key[:KEY_DIGITS], _state(fate), _detail(fate)
        )
        yield words.rstrip()
    yield (
        f"a request would find {found.cached_tokens} of its {found.prompt_tokens} tokens in the store "
        "(the last one is always computed)"
    )


def _state(fate: BlockFate) -> str:
    return f"in {', '.join(fate.tiers)}" if fate.state == "held" else fate.state.replace("_", " ")


def _detail(fate: BlockFate) -> str:
    now = time.time()
    parts = [
        f"shared: tenant {fate.tenant}" if fate.tenant.startswith("_") else "",
        f"pinned by {fate.pin}" if fate.pin else "",
        f"expires in {shown(fate.expires_at - now)}" if fate.expires_at is not None and not fate.pin else "",
        "but something before it is missing" if fate.state == "held" and not fate.usable else "",
        on_one_line(fate.detail),
    ]
    return "; ".join(filter(None, parts))


def _positions(start: int, end: int) -> str:
    return f"{start}-{end - 1}"


def _kind(row: BlockRow) -> str:
    kinds = [row.dtype or "?", row.quantisation if row.quantisation not in (None, "none") else "", row.codec or ""]
    return " ".join(kind for kind in kinds if kind)


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
