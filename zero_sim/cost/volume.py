"""Volume of communication: closed form of textbook ZeRO against the calls of a step.

A system that reduces too often, gathers twice or sends padding computes the right numbers at the
wrong cost. If its calls have no closed form, they are sorted by purpose, without control messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from zero_sim.cost.calls import calls_of_step
from zero_sim.cost.forms import Call, ParamSize, in_words
from zero_sim.findings.records import Finding
from zero_sim.scenario.bare_params import skipped_at
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import Scenario

if TYPE_CHECKING:
    from zero_sim.sim import CollectiveRecord

# Lengths of control messages in elements; see `control_elems`.
_CONTROL_ELEMS = 16
_CONTROL_ELEMS_A_PARAM = 4

_SUMS = ("SUM", "AVG", "PREMUL_SUM")
_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_list")
# A broadcast gathers the shard of an owner.
_GATHERING = ("all_gather", "all_gather_list", "broadcast")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWindow:
    """Interval of the event log in which one rank took one step."""

    rank: int
    """Rank in the dp-cp group."""
    world_rank: int
    step: int
    start: int
    stop: int
    """Half-open interval of `EventLog.collectives`, with `start`."""
    skipped: bool
    looked: tuple[tuple[int, int], ...] = ()
    """Intervals in which the rank only returned state to the judge."""

    def records(self, log: Sequence[CollectiveRecord]) -> Sequence[CollectiveRecord]:
        """Return the rank's calls in the step, without barriers."""
        found: list[CollectiveRecord] = []
        for index in range(self.start, self.stop):
            record = log[index]
            # All ranks append to one log, so the interval contains others' calls.
            is_own = record.rank == self.world_rank and record.kind != "barrier"
            if is_own and not any(start <= index < stop for start, stop in self.looked):
                found.append(record)
        return found


def check_volume(
    records: Sequence[CollectiveRecord],
    windows: Sequence[StepWindow],
    *,
    sizes: Mapping[int, Sequence[ParamSize]],
    scenario: Scenario,
) -> Iterator[Finding]:
    """Check kind, group size and elements of all calls of each step.

    Args:
        records: All calls of the world.
        windows: Steps of one dp-cp group, as intervals of `records`.
        sizes: Trained params of each rank.
        scenario: The case as this group sees it.
    """
    forms: dict[tuple[int, bool], Counter[Call]] = {}
    for window in windows:
        if leaves_gathers(scenario, step=window.step):
            continue
        key = (window.rank, window.skipped)
        # Forms depend on rank and skipping only, so compute each once.
        if key not in forms:
            forms[key] = calls_of_step(
                sizes[window.rank], scenario=scenario, rank=window.rank, skipped=window.skipped
            )
        made: Counter[Call] = Counter(
            (record.kind, len(record.group_ranks), record.elems)
            for record in window.records(records)
        )
        if made != forms[key]:
            yield finding_of(
                window,
                "this rank's collectives in the step differ from the closed form: "
                f"{difference(made, forms[key], in_words=in_words)}",
            )
            return


def leaves_gathers(scenario: Scenario, *, step: int) -> bool:
    """Return True if a stage-3 step may gather fewer params because some modules do not run.

    Their number is not exact: prefetched params are gathered even if their module does not run.
    """
    return scenario.system.stage == 3 and bool(skipped_at(scenario.model, step=step))


def finding_of(
    window: StepWindow, message: str, *, check: Check = Check.INVARIANT_VOLUME
) -> Finding:
    """Build a finding about a rank's calls in a step."""
    return Finding(check=check, step=window.step, rank=window.world_rank, message=message)


_Kind = TypeVar("_Kind", bound=tuple[object, ...])


def difference(
    made: Counter[_Kind], owed: Counter[_Kind], *, in_words: Callable[[_Kind], str]
) -> str:
    """Describe surplus and missing calls.

    Args:
        made: Number of calls by kind.
        owed: Expected number of calls by kind.
        in_words: Formats a kind.
    """

    def listed(calls: Counter[_Kind]) -> str:
        return ", ".join(f"{count} x {in_words(call)}" for call, count in sorted(calls.items()))

    parts = [f"{listed(made - owed)} too many" if made - owed else ""]
    parts.append(f"{listed(owed - made)} missing" if owed - made else "")
    return "; ".join(part for part in parts if part)


def rounds_of_sums(scenario: Scenario) -> int:
    """Return the number of rounds of sums in a step: one, or one per micro-batch."""
    return 1 if scenario.system.sync == "last" else scenario.run.micro_batches


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldSize:
    """Sizes of a param or buffer that may be communicated."""

    elems: int
    row_elems: int
    """Elements per row of dim 0; 1 for scalars and empty tensors."""
    elem_bytes: int


def held_sizes_of(module: nn.Module) -> tuple[HeldSize, ...]:
    """Return the sizes of all params and buffers of a bare module, trained or not."""
    tensors = (*module.parameters(), *module.buffers())
    return tuple(
        HeldSize(
            elems=tensor.numel(),
            row_elems=tensor[0].numel() if tensor.dim() and tensor.numel() else 1,
            elem_bytes=tensor.element_size(),
        )
        for tensor in tensors
    )


def control_elems(sizes: Sequence[HeldSize | ParamSize]) -> int:
    """Return the largest length of a control message: a few numbers, and a few per param."""
    # Norms by param, flags and counts are control; anything longer may be data.
    return _CONTROL_ELEMS + _CONTROL_ELEMS_A_PARAM * len(sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Messages:
    """Floating-point calls of one rank in one step, without control messages."""

    reduced: tuple[CollectiveRecord, ...]
    """Sums over ranks."""
    gathered: tuple[CollectiveRecord, ...]
    """Calls that bring a rank elements of other ranks."""


def messages_of(
    window: StepWindow, records: Sequence[CollectiveRecord], *, control: int
) -> Messages:
    """Sort the calls of a step by purpose.

    Args:
        window: Interval of the step in the log.
        records: All calls of the world.
        control: Largest length of a control message in elements.
    """
    reduced: list[CollectiveRecord] = []
    gathered: list[CollectiveRecord] = []
    for record in window.records(records):
        if "float" not in record.dtype or max(record.elems, record.output_elems) <= control:
            # Integers are counts or fp8 bytes, never gradients or plain params.
            continue
        if record.kind in _REDUCING and record.detail.partition(" ")[0] in _SUMS:
            # `detail` begins with the reduce op; a maximum is no sum of gradients.
            reduced.append(record)
        elif record.kind in _GATHERING:
            gathered.append(record)
    return Messages(reduced=tuple(reduced), gathered=tuple(gathered))
