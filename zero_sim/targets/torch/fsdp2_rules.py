"""Rules by which `fully_shard` computes what it is set to, and what of that is by none.

[Note: what FSDP2 computes by what it is set to]
Gradients accumulate and are reduced in `reduce_dtype`, and what came is cast to the dtype of the
sharded params, fp32. Without more it is divided by AVG. With `set_force_sum_reduction_for_comms` it
is a sum that is divided after it; with `set_gradient_divide_factor` alone PREMUL_SUM, which
multiplies before it, or AVG where the factor is the number of ranks that share what is sharded. In
fp16 a power of two is divided by before the sum, and the rest after it. With HSDP the blocks' means
are all-reduced with AVG, which are the bits of one mean where a block has a power of two of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from zero_sim.errors import Problem
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.numerics import Numerics
from zero_sim.targets.torch.fsdp1 import predivide_factor
from zero_sim.targets.torch.fsdp2 import TorchFSDP2

_AFTER = ("avg", "post-rounded")


def numerics_with(scenario: Scenario, chosen: Any) -> Numerics:
    """By which rules a case is computed.

    Args:
        scenario: As the target is given it.
        chosen: The value of each option.
    """
    in_block, reduce = chosen["all_reduce_last"], chosen["reduce_dtype"]
    # What a block summed of several micro-batches stays as it came until it is added to others.
    in_rounds = scenario.system.sync == "every" and not in_block
    division = _division(scenario, chosen)
    return replace(
        TorchFSDP2.numerics,
        **division,
        sync="every-in-block" if in_block else None,
        divide_each="round" if in_rounds and division["divide"] in _AFTER else "step",
        accumulate_dtype="fp32" if in_rounds else reduce,
        reduce_dtype=reduce,
        told_dtype="fp32",
    )


def reduced_in(scenario: Scenario, chosen: Any) -> str:
    """The dtype in which ranks are summed; arguments as for `numerics_with`."""
    reduce = chosen["reduce_dtype"]
    return scenario.model.dtype if reduce == "param" else reduce


def _division(scenario: Scenario, chosen: Any) -> dict[str, Any]:
    """The rules of division, by what FSDP2 hands to the collectives."""
    factor, ranks = chosen["divide_factor"], scenario.world.size
    together = ranks // scenario.system.redundancy
    by = {"divide_by": factor or "ranks"}
    if reduced_in(scenario, chosen) == "fp16":
        first = predivide_factor(factor or ranks)
        return {"divide": "post-rounded", "predivide_by": first, **by}
    if chosen["force_sum"]:
        return {"divide": "post-rounded", **by}
    if factor in (0.0, together):
        return {"divide": "avg", **by}
    # Without a collective there is no PREMUL_SUM.
    return {"divide": "pre" if together == 1 else "premul", **by}


def without_rule(scenario: Scenario, chosen: Any) -> Iterator[Problem]:
    """What of a case is by no rule that can be declared; arguments as for `numerics_with`."""
    ranks, blocks = scenario.world.size, scenario.system.redundancy
    together = ranks // blocks
    reduce, factor = chosen["reduce_dtype"], chosen["divide_factor"]
    divides_in_block = not sums_plainly(scenario, chosen) and factor in (0.0, together)
    if blocks > 1 and divides_in_block and together & (together - 1):
        yield Problem(
            path="system.redundancy",
            message="FSDP2 rounds the mean of each block before it adds these, which is by no "
            f"rule that can be declared, got blocks of {together} ranks.",
            suggestion="Try blocks of 1, 2, 4 or 8, or option force_sum.",
        )
    is_narrower = reduce not in ("param", "fp32") and scenario.model.dtype == "fp32"
    if is_narrower and scenario.system.sync == "last" and scenario.run.micro_batches > 1:
        yield Problem(
            path="run.micro_batches",
            message=f"FSDP2 adds fp32 gradients, not rounded to {reduce}, to what it "
            f"accumulated in {reduce}, which is by no rule that can be declared.",
            suggestion="Try system.sync = 'every', or one micro-batch.",
        )


def divides_twice(scenario: Scenario, chosen: Any) -> bool:
    """Whether torch 2.13 divides by `divide_factor` twice; arguments as for `numerics_with`."""
    has_all = scenario.world.size == scenario.system.redundancy
    return bool(chosen["divide_factor"]) and has_all and sums_plainly(scenario, chosen)


def sums_plainly(scenario: Scenario, chosen: Any) -> bool:
    """Whether collectives neither divide nor multiply; arguments as for `numerics_with`."""
    return chosen["force_sum"] or reduced_in(scenario, chosen) == "fp16"
