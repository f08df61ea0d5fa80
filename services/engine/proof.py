"""What a process proved of a model on this machine, kept until the next boot: a worker that died is back sooner.

Whether rows are exact and logits true depends on the processor, the libraries, the threads, our own code and the
weights. None of these changes when a worker is started again, so a proof is named after a digest of them all, and holds
the bits of the canary's logits: who finds one computes these again, and believes it only if they are the same.
See infra/decisions/0025-proofs-last-until-the-next-boot.md.
"""

import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

import kernels
from kernels import dispatch
from kernels.arithmetic import Arithmetic
from services.config import library_switches
from services.engine.arithmetic import choose_arithmetic
from services.engine.check import Canary, canary_of, self_check
from services.engine.model import Model
from services.engine.model_config import ModelConfig
from services.models.files import ModelFiles

log = logging.getLogger(__name__)

FOLDER = "proofs"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CPU_INFO = Path("/proc/cpuinfo")


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`arithmetic` by name and id (hex) passed the self-check; `canary`: the digest (hex) of its logits then."""

    arithmetic: str
    arithmetic_id: str
    canary: str


class Proofs:
    """Of one model, dtype (never "auto") and quantisation, in the model's own folder.

    Set the threads first: they are part of what is proved.
    """

    def __init__(self, files: ModelFiles, dtype: str, quantisation: str = "none") -> None:
        self._files = files
        self._dtype = dtype
        self._quantisation = quantisation
        circumstances = _circumstances(dtype, quantisation)
        self._path = files.path / FOLDER / f"{circumstances}.json" if circumstances else None
        self._found = self._read()

    def arithmetic(self) -> Arithmetic:
        """The one that was proved here, else the first that proves exact now. Raises `SetupError`."""
        if self._found is not None:
            found_id = bytes.fromhex(self._found.arithmetic_id)
            known = dispatch.recall(self._dtype, self._found.arithmetic, found_id, self._quantisation)
            if known is not None:
                log.info("arithmetic %s, id %s, as proved before", known.name, known.id.hex())
                return known
        return choose_arithmetic(ModelConfig.from_hf(self._files.config), self._dtype, self._quantisation)

    def check(self, model: Model) -> Canary:
        """Raises `SetupError` unless `model` computes what it should: as proved before, or by the whole self-check."""
        started_s = time.monotonic()
        if self._found is not None:
            canary = canary_of(model, self._files)
            if self._found == _proof(model, canary):
                log.info("self-check: the same bits as proved before, in %.1f s", time.monotonic() - started_s)
                return canary
            log.warning("self-check: other bits than were proved since the last boot; the whole check is run again")
        canary = self_check(model, self._files)
        self._keep(_proof(model, canary))
        return canary

    def _read(self) -> Proof | None:
        if self._path is None:
            return None
        with suppress(OSError, msgspec.DecodeError, ValueError):
            proof = msgspec.json.decode(self._path.read_bytes(), type=Proof)
            bytes.fromhex(proof.arithmetic_id)
            return proof
        return None

    def _keep(self, proof: Proof) -> None:
        """A folder that cannot be written costs the next start two seconds, no more."""
        if self._path is None:
            return
        beside = self._path.with_suffix(f".{os.getpid()}.part")
        with suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            beside.write_bytes(msgspec.json.encode(proof))
            os.replace(beside, self._path)


def _proof(model: Model, canary: Canary) -> Proof:
    return Proof(model.arithmetic.name, model.arithmetic.id.hex(), canary.digest)


def _circumstances(dtype: str, quantisation: str) -> str:
    """A digest of what a proof depends on besides the model; empty where the machine does not tell its boots apart."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        boot, cpu = _BOOT_ID.read_bytes(), _CPU_INFO.read_bytes().partition(b"\n\n")[0]
    except OSError:
        return ""
    # The clock speed is a line of its own that changes all the time.
    cpu = b"\n".join(line for line in cpu.splitlines() if line.startswith((b"model", b"flags", b"stepping", b"vendor")))
    parts = [
        boot,
        cpu,
        dtype.encode(),
        quantisation.encode(),
        torch.__version__.encode(),
        torch.__config__.show().encode(),
    ]
    parts += [str(torch.get_num_threads()).encode(), *library_switches(), *_sources()]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _sources() -> Iterator[bytes]:
    """Our own code that a model is computed and checked with, as it is written and as it was built."""
    for folder in (Path(kernels.__file__).parent, Path(__file__).parent):
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.so")]):
            yield path.read_bytes()
