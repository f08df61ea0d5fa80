"""How many guesses each sequence of a pass gets: as long as one more makes the pass give more tokens a second."""

from collections.abc import Sequence

from services.engine.step_cost import StepCost

MARGIN = 1.15  # what is won must be more than what it costs by this, since both are estimates
NO_MARGIN = 0.0  # for what is computed anyway, now or in a later pass


def share_out(
    chances: Sequence[Sequence[float]],
    num_rows: int,
    num_tokens: int,
    cost: StepCost,
    budget: int,
    *,
    certain: float = MARGIN,
) -> list[int]:
    """For each sequence how many of its guesses are worth a row; `chances[i][k]`: that its first k + 1 come true.

    `num_rows` are computed anyway, and give `num_tokens`. At most `budget` guesses in all, the likeliest.
    `certain`: the margin of those that come true for sure: their rows are only computed earlier, but hold up who has
    none.
    """
    counts = [0] * len(chances)
    if not cost.is_known:
        return counts
    # A sequence's chances fall, so the best one left is always the next of its sequence.
    best_first = sorted(
        ((chance, -k, i) for i, own in enumerate(chances) for k, chance in enumerate(own)), reverse=True
    )
    rows, tokens = num_rows, float(num_tokens)
    for chance, _, i in best_first[:budget]:
        margin = certain if chance == 1.0 else MARGIN
        if chance * cost.seconds(rows) <= margin * tokens * cost.row_s:
            break
        counts[i] += 1
        rows, tokens = rows + 1, tokens + chance
    return counts
