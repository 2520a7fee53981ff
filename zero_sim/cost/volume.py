"""Volume of communication: closed form of textbook ZeRO against the calls of a step.

A system that reduces too often, gathers twice or sends padding computes the right numbers at the
wrong cost. For systems without a closed form, `messages_of` sorts calls by purpose.
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

# Control message lengths in elements; see `control_elems`.
_CONTROL_ELEMS = 16
_CONTROL_ELEMS_A_PARAM = 4

_SUMS = ("SUM", "AVG", "PREMUL_SUM")
_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_list")
# A broadcast gathers an owner's shard.
_GATHERING = ("all_gather", "all_gather_list", "broadcast")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWindow:
    """Interval of the event log in which a rank took a step."""

    rank: int
    """Group rank."""
    world_rank: int
    step: int
    start: int
    stop: int
    """Half-open interval of `EventLog.collectives`, with `start`."""
    skipped: bool
    looked: tuple[tuple[int, int], ...] = ()
    """Intervals in which the rank returned state to the judge. Their calls do not count."""

    def records(self, log: Sequence[CollectiveRecord]) -> Sequence[CollectiveRecord]:
        """Return the rank's calls in the step, without barriers."""
        found: list[CollectiveRecord] = []
        for index in range(self.start, self.stop):
            record = log[index]
            # All ranks share the log, so the interval also contains other ranks' calls.
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
    """Check kind, group size and elements of each step's calls.

    Args:
        records: All calls in the world.
        windows: A dp-cp group's steps, as intervals of `records`.
        sizes: Trained params by group rank.
        scenario: The dp-cp group's case.
    """
    forms: dict[tuple[int, bool], Counter[Call]] = {}
    for window in windows:
        if leaves_gathers(scenario, step=window.step):
            continue
        key = (window.rank, window.skipped)
        # The form depends only on rank and skipping, so compute it once.
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
    """Return True if a step at stage 3 may gather fewer params, because some modules do not run."""
    # The exact number is unknown, because params may be prefetched for a module that does not run.
    return scenario.system.stage == 3 and bool(skipped_at(scenario.model, step=step))


def finding_of(
    window: StepWindow, message: str, *, check: Check = Check.INVARIANT_VOLUME
) -> Finding:
    """Build a finding about a rank's calls in a step."""
    return Finding(check=check, step=window.step, rank=window.world_rank, message=message)


_Kind = TypeVar("_Kind", bound=tuple[object, ...])


def difference(
    made: Counter[_Kind], wanted: Counter[_Kind], *, in_words: Callable[[_Kind], str]
) -> str:
    """Describe surplus and missing calls; `in_words` formats a kind of call."""

    def listed(calls: Counter[_Kind]) -> str:
        return ", ".join(f"{count} x {in_words(call)}" for call, count in sorted(calls.items()))

    parts = [f"{listed(made - wanted)} too many" if made - wanted else ""]
    parts.append(f"{listed(wanted - made)} missing" if wanted - made else "")
    return "; ".join(part for part in parts if part)


def rounds_of_sums(scenario: Scenario) -> int:
    """Return how often a step sums gradients over ranks: once, or once per micro-batch."""
    return 1 if scenario.system.sync == "last" else scenario.run.micro_batches


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldSize:
    """Sizes of a param or buffer."""

    elems: int
    row_elems: int
    """Elements per row (dim 0); 1 for scalars and empty tensors."""
    elem_bytes: int


def held_sizes_of(module: nn.Module) -> tuple[HeldSize, ...]:
    """Return the sizes of a bare module's params and buffers, trained or not."""
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
    """Return the largest length of a control message, in elements."""
    # Flags, counts, and norms by param are control messages. A longer message may be data.
    return _CONTROL_ELEMS + _CONTROL_ELEMS_A_PARAM * len(sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Messages:
    """A rank's floating-point calls in a step, without control messages."""

    reduced: tuple[CollectiveRecord, ...]
    """Sums over ranks."""
    gathered: tuple[CollectiveRecord, ...]
    """Calls that copy elements from other ranks."""


def messages_of(
    window: StepWindow, records: Sequence[CollectiveRecord], *, control: int
) -> Messages:
    """Sort a step's calls by purpose; control messages have at most `control` elements."""
    reduced: list[CollectiveRecord] = []
    gathered: list[CollectiveRecord] = []
    for record in window.records(records):
        if "float" not in record.dtype or max(record.elems, record.output_elems) <= control:
            # Integers are counts or fp8 bytes, never gradients or plain params.
            continue
        if record.kind in _REDUCING and record.detail.partition(" ")[0] in _SUMS:
            # `detail` begins with the reduce op. A maximum is no sum of gradients.
            reduced.append(record)
        elif record.kind in _GATHERING:
            gathered.append(record)
    return Messages(reduced=tuple(reduced), gathered=tuple(gathered))
