"""How far the rotations of a model are stretched. Without torch, so that a model can be judged before it is loaded."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Scaling that leaves a position's rotation a function of the position alone, so that KV can be cut anywhere.

    `kind`: "default"; "linear", which divides every frequency by `factor`; "ntk", which raises the base by it; "llama3"
    and "yarn", which stretch low frequencies and leave high ones; "factors", which divides each by its own number.
    `attention_factor` multiplies cosines and sines, as yarn wants for long contexts.
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()
