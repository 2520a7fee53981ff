"""Norms over many random gradients, which decide a system's norm rule.

Norm rules differ by an ulp, and only for some gradients, so a few cases do not distinguish them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from zero_sim.rules.cases import DIVISOR
from zero_sim.rules.search import RuleSearch
from zero_sim.run.small_cases import changed, rounded, with_model
from zero_sim.scenario.spec import ModelName, ModelSpec, Scenario

NORMS_MIN = 200
"""Number of random gradients whose norms must fit a rule before it is declared."""
# Each step has another gradient.
_NORM_STEPS = 10
# More than `NORMS_MIN` requires, because norms that depend on the summation order are not compared.
_NORM_CASES = 22
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
"""Param shapes; every second entry has more than 1,000 elements."""
_WIDTHS = (2, 12, 3, 13, 4, 14, 5, 15, 6, 16)
"""`mlp` widths that replace these shapes."""


def norm_cases(
    base: Scenario, *, model: ModelName, ranks_max: int, divisor: int = 1
) -> Iterator[Scenario]:
    """Yield clipping cases with more than `NORMS_MIN` gradients, half of them long.

    Args:
        base: A case that passes.
        model: `params`, or `mlp` for systems that do not support `params`.
        ranks_max: Largest number of ranks.
        divisor: Number that divides each param's first dimension.
    """
    # Shard norms depend on the number of ranks.
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
            # Shifted each round, so that every shape meets several world sizes.
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
    """Find rules for all gradients' norms; return the reason if there are none.

    If too few gradients pass, or if no rule fits all, the norm is declared as `reported`.

    Args:
        search: Search whose rules already pass a few clipping cases.
        base: A case that passes.
        ranks_max: Largest number of ranks.
        refuses: Returns True if the target refuses a case.
    """
    # Bare params give more shapes, so prefer them.
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
            # No refusal of sizes, so divisible sizes will not help.
            break
    search.numerics["norm"] = "reported"
    return why


def norms_passed(search: RuleSearch) -> int:
    """Return the number of gradients whose norms pass under the rules found so far."""
    clipped = (case for case in search.passed if case.optimizer.clip_norm is not None)
    return sum(case.run.steps for case in clipped)
