"""fp32 gradients staged for the optimizer: closed form of their bytes, and check.

Without a step buffer they are as long as the rank's shard. With one, they are as long as the
buffer, or as the longest part of a param that does not fit, for any number of params. The harness
measures the gradients passed to each optimizer step by torch's global hook, which works for any
system.
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
    """Return the elements of each fragment that a rank owns, in no particular order.

    Args:
        sizes: Trained params of the rank, in registration order.
        scenario: The case as its dp-cp group sees it.
        rank: Rank in the dp-cp group.
    """
    elems = {size.name: size.elems for size in sizes}
    lengths = []
    for form in bucket_forms(sizes, scenario=scenario, rank=rank):
        stop = form.shard_start + form.shard_elems
        for name, start in form.starts:
            # Intersection of param and shard; negative if they do not meet.
            own = min(start + elems[name], stop) - max(start, form.shard_start)
            lengths.append(max(0, own))
    # Params outside the shard are no fragments, and would count as fitting a step buffer.
    return [length for length in lengths if length]


def staged_bytes(sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int) -> int:
    """Return the most bytes of fp32 gradients that the optimizer receives at once.

    Args:
        sizes: As for `owned_lengths`.
        scenario: As for `owned_lengths`.
        rank: As for `owned_lengths`.
    """
    lengths = owned_lengths(sizes, scenario=scenario, rank=rank)
    buffer = scenario.system.step_buffer_elems
    if buffer is None:
        # One optimizer step over the whole shard.
        return sum(lengths) * _FP32_BYTES
    # A fragment longer than the buffer is stepped alone; the others share the buffer.
    by_themselves = [length for length in lengths if length > buffer]
    fitting = [buffer] if len(by_themselves) < len(lengths) else []
    return max([*by_themselves, *fitting], default=0) * _FP32_BYTES


def staging_peak(sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int) -> int:
    """Return the peak bytes of staged gradients: the buffer, and one fragment that does not fit.

    Args:
        sizes: As for `owned_lengths`.
        scenario: As for `owned_lengths`.
        rank: As for `owned_lengths`.
    """
    lengths = owned_lengths(sizes, scenario=scenario, rank=rank)
    buffer = scenario.system.step_buffer_elems
    if buffer is None:
        return sum(lengths) * _FP32_BYTES
    longer = max((length for length in lengths if length > buffer), default=0)
    has_fitting = any(length <= buffer for length in lengths)
    # The buffer is only allocated if a fragment fits into it.
    return (longer + buffer * has_fitting) * _FP32_BYTES


def check_staging(
    moments: Sequence[Moment], *, owed: int, step: int, rank: int
) -> Iterator[Finding]:
    """Check the bytes of gradients passed to a rank's optimizer.

    Args:
        moments: Moments of the step.
        owed: Largest number of bytes.
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
                message=f"this rank's optimizer is given {moment.bytes} bytes of gradients, "
                f"expected at most {owed} with a step buffer",
            )
