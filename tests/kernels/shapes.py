"""A small model's shapes: grouped queries, a head size that is no multiple of the block, outputs that fill no tile."""

from kernels.arithmetic import Shapes

SMALL = Shapes(
    linears=((112, 48), (48, 48), (160, 48), (48, 80)),
    head=(200, 48),
    heads=3,
    kv_heads=1,
    head_dim=16,
)
