"""fp32 gradients staged for the optimizer: closed form in bytes, and check.

Without a step buffer, a rank stages its whole shard at once. With a step buffer, it stages at most
one buffer, or a longer fragment, for any number of params. The harness measures the gradients of
each optimizer step by torch's global hook, which needs no access to the system.
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
    """Return the elements in each fragment on a rank, in no particular order.

    Args:
        sizes: The rank's trained params, in registration order.
        scenario: The dp-cp group's case.
        rank: Group rank.
    """
    elems = {size.name: size.elems for size in sizes}
    lengths = []
    for form in bucket_forms(sizes, scenario=scenario, rank=rank):
        stop = form.shard_start + form.shard_elems
        for name, start in form.starts:
            # Intersection of param and shard; negative if they do not meet.
            own = min(start + elems[name], stop) - max(start, form.shard_start)
            lengths.append(max(0, own))
    # Omit empty fragments, which would count as fitting into a step buffer.
    return [length for length in lengths if length]


def staged_bytes(sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int) -> int:
    """Return the most gradient bytes in an optimizer step; arguments as for `owned_lengths`."""
    lengths = owned_lengths(sizes, scenario=scenario, rank=rank)
    buffer = scenario.system.step_buffer_elems
    if buffer is None:
        # A single optimizer step over the whole shard.
        return sum(lengths) * _FP32_BYTES
    # A fragment longer than the buffer is stepped alone. All others share the buffer.
    by_themselves = [length for length in lengths if length > buffer]
    fitting = [buffer] if len(by_themselves) < len(lengths) else []
    return max([*by_themselves, *fitting], default=0) * _FP32_BYTES


def staging_peak(sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int) -> int:
    """Return the peak bytes of staged gradients; arguments as for `owned_lengths`."""
    lengths = owned_lengths(sizes, scenario=scenario, rank=rank)
    buffer = scenario.system.step_buffer_elems
    if buffer is None:
        return sum(lengths) * _FP32_BYTES
    # A fragment that does not fit is staged while the buffer still exists.
    longer = max((length for length in lengths if length > buffer), default=0)
    has_fitting = any(length <= buffer for length in lengths)
    # The buffer exists only if a fragment fits into it.
    return (longer + buffer * has_fitting) * _FP32_BYTES


def check_staging(
    moments: Sequence[Moment], *, wanted: int, step: int, rank: int
) -> Iterator[Finding]:
    """Check the gradient bytes passed to a rank's optimizer in a step."""
    for moment in moments:
        if moment.what == "update" and moment.bytes > wanted:
            yield Finding(
                check=Check.INVARIANT_MEMORY,
                step=step,
                rank=rank,
                phase=Phase.OPTIMIZER,
                message=f"this rank's optimizer is given {moment.bytes} bytes of gradients, "
                f"expected at most {wanted} with a step buffer",
            )
