"""The numbers that shape a forward pass, as the kernels ask for them."""

from kernels.arithmetic import Shapes
from services.models.architecture import Architecture


class ModelConfig(Architecture):
    """Made by `from_hf`."""

    @property
    def qkv_rows(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def shapes(self) -> Shapes:
        return Shapes(
            linears=(
                (self.qkv_rows, self.hidden),
                (self.hidden, self.num_heads * self.head_dim),
                (2 * self.intermediate, self.hidden),
                (self.hidden, self.intermediate),
            ),
            head=(self.vocab_size, self.hidden),
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )
