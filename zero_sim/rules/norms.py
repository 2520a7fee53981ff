"""Norms of many random gradients, which decide by which rule a system takes its norm.

Rules for a norm differ by a unit in the last place of some gradients, so that a few cases do not
tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from zero_sim.rules.cases import DIVISOR
from zero_sim.rules.search import RuleSearch
from zero_sim.run.small_cases import changed, rounded, with_model
from zero_sim.scenario.spec import ModelName, ModelSpec, Scenario

NORMS_MIN = 200
"""Random gradients whose norms must have the bits of a rule before it is declared."""
_NORM_STEPS = 10
"""Steps of each case: each brings another gradient."""
_NORM_CASES = 22
"""More than `NORMS_MIN` needs: a norm that is within rounding of another order is not compared."""
_SHAPES: Sequence[tuple[tuple[int, ...], ...]] = (
    ((2, 2),),
    ((1201,),),
    ((3,), (2,)),
    ((33, 40), (5,)),
    ((7, 5), (3,)),
    ((64, 32), (7,)),
    ((17,), (5, 4)),
    ((700,), (31, 17)),
    ((40,), (31, 3)),
    ((1025,), (2,)),
)
"""Shapes of params; every second one has more than 1,000 elements."""
_WIDTHS = (2, 12, 3, 13, 4, 14, 5, 15, 6, 16)
"""Widths of `mlp` in place of these shapes."""


def norm_cases(
    base: Scenario, *, model: ModelName, ranks_max: int, divisor: int = 1
) -> Iterator[Scenario]:
    """Cases that clip by the norms of `NORMS_MIN` random gradients and more, half of them long.

    Args:
        base: A case that passes.
        model: `params`, or `mlp` for a system that does not take that.
        ranks_max: Most ranks.
        divisor: Number of which first dimensions of params are multiples.
    """
    sizes = [size for size in (2, 3, 4) if size <= ranks_max] or [ranks_max]
    for index in range(_NORM_CASES):
        turn, place = divmod(index, len(_SHAPES))
        if model == "params":
            shapes = tuple((rounded(first, divisor), *rest) for first, *rest in _SHAPES[place])
            spec = ModelSpec(name="params", dtype=base.model.dtype, shapes=shapes)
        else:
            width = rounded(_WIDTHS[place], divisor)
            spec = ModelSpec(name="mlp", dtype=base.model.dtype, hidden=width, blocks=1)
        yield changed(
            base,
            f"norms of gradients {index + 1}",
            model=spec,
            optimizer={"clip_norm": 0.01 * (1 + index % 4), "lr": 0.1},
            world={"size": sizes[(place + turn) % len(sizes)]},
            run={"steps": _NORM_STEPS, "seed": index},
        )


def confirm_norm(
    search: RuleSearch,
    base: Scenario,
    *,
    ranks_max: int,
    refuses: Callable[[Scenario], bool],
) -> str:
    """Find rules by which the norms of all gradients pass; why there are none, if there are none.

    If too few gradients pass, or no rule fits them all, the norm is taken as told.

    Args:
        search: Knows rules by which a few cases that clip pass.
        base: A case that passes.
        ranks_max: Most ranks.
        refuses: Whether the target refuses a case.
    """
    result = search.judge(with_model(base, "params"))
    passes = not isinstance(result, str) and result.verdict == "pass"
    is_limited = isinstance(result, str) and result in search.limited.values()
    model: ModelName = "params" if passes or is_limited else "mlp"
    why = ""
    for divisor in (1, DIVISOR):
        drawn = norm_cases(base, model=model, ranks_max=ranks_max, divisor=divisor)
        cases = [case for case in drawn if not refuses(case)]
        why = search.settle(*cases)
        if not why and norms_passed(search) >= NORMS_MIN:
            return ""
        if why and any(case not in search.limited for case in cases):
            break
    search.numerics["norm"] = "told"
    return why


def norms_passed(search: RuleSearch) -> int:
    """Gradients whose norms pass by the rules that were found."""
    clipped = (case for case in search.passed if case.optimizer.clip_norm is not None)
    return sum(case.run.steps for case in clipped)
