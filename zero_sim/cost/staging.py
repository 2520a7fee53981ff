"""Gradients as fp32 that a step stages: how much of them may be in memory, against what is.

Without a step buffer they are as long as what a rank owns; with one as long as the buffer, or as
the longest part of a param that does not fit into it, however many params there are. The harness
looks at what the optimizer is given each time it steps, by a hook of torch's that no system has to
know of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from zero_sim.cost.forms import ParamSize, bucket_forms
from zero_sim.findings.dataflow import Phase
from zero_sim.findings.records import Finding
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import Scenario

if TYPE_CHECKING:
    from zero_sim.cost.memory_recorder import Moment

_FP32_BYTES = 4


def owned_lengths(sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int) -> list[int]:
    """Return the elements of each part of a param that a rank owns, in no order that matters.

    Args:
        sizes: The params that the rank trains, in registration order.
        scenario: The case as its dp-cp group sees it.
        rank: Rank in that group.
    """
    elems = {size.name: size.elems for size in sizes}
    lengths = []
    for form in bucket_forms(sizes, scenario=scenario, rank=rank):
        stop = form.shard_start + form.shard_elems
        for name, start in form.starts:
            own = min(start + elems[name], stop) - max(start, form.shard_start)
            lengths.append(max(0, own))
    return [length for length in lengths if length]


def staged_bytes(sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int) -> int:
    """Return the most bytes of gradients as fp32 that an optimizer is given at a time.

    Args:
        sizes: As for `owned_lengths`.
        scenario: Likewise.
        rank: Likewise.
    """
    lengths = owned_lengths(sizes, scenario=scenario, rank=rank)
    buffer = scenario.system.step_buffer_elems
    if buffer is None:
        return sum(lengths) * _FP32_BYTES
    by_themselves = [length for length in lengths if length > buffer]
    fitting = [buffer] if len(by_themselves) < len(lengths) else []
    return max([*by_themselves, *fitting], default=0) * _FP32_BYTES


def staging_peak(sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int) -> int:
    """Return the most bytes of them there are: with a buffer, it and what does not fit into it.

    Args:
        sizes: As for `owned_lengths`.
        scenario: Likewise.
        rank: Likewise.
    """
    lengths = owned_lengths(sizes, scenario=scenario, rank=rank)
    buffer = scenario.system.step_buffer_elems
    if buffer is None:
        return sum(lengths) * _FP32_BYTES
    longer = max((length for length in lengths if length > buffer), default=0)
    has_fitting = any(length <= buffer for length in lengths)
    return (longer + buffer * has_fitting) * _FP32_BYTES


def check_staging(
    moments: Sequence[Moment], *, owed: int, step: int, rank: int
) -> Iterator[Finding]:
    """Check what the optimizer of a rank is given.

    Args:
        moments: Moments of the step.
        owed: Most bytes.
        step: Index of the step.
        rank: Rank in the dp-cp group.
    """
    for moment in moments:
        if moment.what == "update" and moment.bytes > owed:
            yield Finding(
                check=Check.INVARIANT_MEMORY,
                step=step,
                rank=rank,
                phase=Phase.OPTIMIZER,
                message=f"this rank's optimizer is given gradients that take {moment.bytes} bytes, "
                f"expected at most {owed} with a step buffer",
            )
