"""Shapes of models, for what depends on them."""

from kernels.arithmetic import Shapes

SMALL = Shapes(
    linears=((112, 48), (48, 48), (160, 48), (48, 80)),
    head=(200, 48),
    heads=3,
    kv_heads=1,
    head_dim=16,
)
"""Grouped queries, a head size that is no multiple of the block, outputs that fill no tile."""

DEFAULT_MODEL = Shapes(
    linears=((960, 576), (576, 576), (3072, 576), (576, 1536)),
    head=(49152, 576),
    heads=9,
    kv_heads=3,
    head_dim=64,
)
"""SmolLM2-135M."""
