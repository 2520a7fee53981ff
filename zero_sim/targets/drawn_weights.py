"""Targets that draw their own start values, for example by an init after `to("meta")`.

If a target has `draws_weights = True`, its `build` overwrites the module's trained params, but not
its buffers and untrained params. The reference begins with the values that `params` reports before
the first step, because draws of sharded tensors may depend on the number of ranks.
`zero_sim.judge.drawn` compares the draws between ranks and between params.
"""

from __future__ import annotations

from collections.abc import Iterator

from zero_sim.errors import Problem, ProtocolError
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.answers import shown
from zero_sim.targets.protocol import Target
from zero_sim.workloads import EXACT_MODELS


def draws_weights(target: Target) -> bool:
    """Return True if a target declares that it draws its start values.

    Raises:
        ProtocolError: It declares something else.
    """
    declared: object = getattr(target, "draws_weights", False)
    if not isinstance(declared, bool):
        raise ProtocolError(
            f"expected `draws_weights` of target {target.name!r} to be True or False, got "
            f"{shown(declared)}."
        )
    return declared


def drawn_problems(scenario: Scenario) -> Iterator[Problem]:
    """Yield the fields of a case that need the case's own start values."""
    # Exact models stay within a budget computed from the case's start values, and fp8 params take
    # their scales from them.
    needs = (
        ("model.name", scenario.model.name in (*EXACT_MODELS, "fp8"), "a model"),
        ("model.distinct_start", scenario.model.distinct_start, "ranks that begin apart"),
        ("expect.one_device", scenario.expect.one_device, "one device to compare with"),
    )
    for path, has, what in needs:
        if has:
            yield Problem(
                path=path,
                message=f"this target draws its own start values, got {what} with values of its "
                "own.",
                suggestion="Remove it.",
            )
