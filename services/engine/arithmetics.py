"""The arithmetics of a build: one for both stages, or, on mixed hardware, one for each."""

from typing import NamedTuple

from kernels.arithmetic import Arithmetic
from services.models.files import ModelFiles
from services.models.registry import build_id


class Arithmetics(NamedTuple):
    prefill: Arithmetic
    decode: Arithmetic

    @classmethod
    def one(cls, arithmetic: Arithmetic) -> "Arithmetics":
        return cls(arithmetic, arithmetic)

    @property
    def is_mixed(self) -> bool:
        return self.prefill.id != self.decode.id

    def build_of(self, files: ModelFiles) -> str:
        ids = [self.prefill.id, self.decode.id] if self.is_mixed else [self.decode.id]
        return build_id(files, *ids)
