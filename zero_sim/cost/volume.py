"""Volume of communication: closed forms of the textbook's ZeRO against the calls of a step.

A stage that reduces more than it has to, gathers twice or sends elements that belong to nobody has
the right numbers and the wrong cost. Where the calls of a system are not known in advance, they are
sorted by what they do, control messages apart.
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

_CONTROL_ELEMS = 16
_CONTROL_ELEMS_A_PARAM = 4

_SUMS = ("SUM", "AVG", "PREMUL_SUM")
_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_list")
_GATHERING = ("all_gather", "all_gather_list", "broadcast")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWindow:
    """The stretch of the event log in which one rank took one step."""

    rank: int
    """Rank in its dp-cp group."""
    world_rank: int
    step: int
    start: int
    stop: int
    """Half-open range of `EventLog.collectives`."""
    skipped: bool
    looked: tuple[tuple[int, int], ...] = ()
    """Stretches of it in which the rank only showed the judge what it holds."""

    def records(self, log: Sequence[CollectiveRecord]) -> Sequence[CollectiveRecord]:
        """Return the calls of the rank in the step."""
        found: list[CollectiveRecord] = []
        for index in range(self.start, self.stop):
            record = log[index]
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
    """Check kind, group size and elements of every call of every step.

    Args:
        records: All calls of the world.
        windows: Where the steps of one dp-cp group lie among them.
        sizes: What each of its ranks trains, by rank.
        scenario: The case as that group sees it.
    """
    forms: dict[tuple[int, bool], Counter[Call]] = {}
    for window in windows:
        if leaves_gathers(scenario, step=window.step):
            continue
        key = (window.rank, window.skipped)
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
                "this rank's collectives of the step are not those of the closed form: "
                f"{difference(made, forms[key], in_words=in_words)}",
            )
            return


def leaves_gathers(scenario: Scenario, *, step: int) -> bool:
    """True if a step gathers fewer params than it has, since some modules do not run in it.

    Those that are gathered ahead of their use are gathered all the same.
    """
    return scenario.system.stage == 3 and bool(skipped_at(scenario.model, step=step))


def finding_of(
    window: StepWindow, message: str, *, check: Check = Check.INVARIANT_VOLUME
) -> Finding:
    """What is wrong with the calls of a rank's step."""
    return Finding(check=check, step=window.step, rank=window.world_rank, message=message)


_Kind = TypeVar("_Kind", bound=tuple[object, ...])


def difference(
    made: Counter[_Kind], owed: Counter[_Kind], *, in_words: Callable[[_Kind], str]
) -> str:
    """Which calls are too many and which are missing.

    Args:
        made: By kind of call how many there were.
        owed: The same of those that there have to be.
        in_words: Says a kind.
    """

    def listed(calls: Counter[_Kind]) -> str:
        return ", ".join(f"{count} x {in_words(call)}" for call, count in sorted(calls.items()))

    parts = [f"{listed(made - owed)} too many" if made - owed else ""]
    parts.append(f"{listed(owed - made)} missing" if owed - made else "")
    return "; ".join(part for part in parts if part)


def rounds_of_sums(scenario: Scenario) -> int:
    """How often a step sums over ranks: once, or once a micro-batch."""
    return 1 if scenario.system.sync == "last" else scenario.run.micro_batches


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldSize:
    """A tensor of a module as far as it may be moved."""

    elems: int
    row_elems: int
    """Of a row of its dim 0; 1 without dims, or without elements."""
    elem_bytes: int


def held_sizes_of(module: nn.Module) -> tuple[HeldSize, ...]:
    """All params and buffers of a module, trained or not; before anybody wrapped it."""
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
    """Elements of a control message at most: a few numbers, or a few a param, as norms are."""
    return _CONTROL_ELEMS + _CONTROL_ELEMS_A_PARAM * len(sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Messages:
    """What one rank called in one step; of floating-point numbers, as params and gradients are."""

    reduced: tuple[CollectiveRecord, ...]
    """Sums over ranks that are no control messages."""
    gathered: tuple[CollectiveRecord, ...]
    """What brings a rank what others have, and is no control message."""


def messages_of(
    window: StepWindow, records: Sequence[CollectiveRecord], *, control: int
) -> Messages:
    """Sort the calls of a step.

    Args:
        window: Where they lie.
        records: All calls of the world.
        control: Elements of a control message at most.
    """
    reduced: list[CollectiveRecord] = []
    gathered: list[CollectiveRecord] = []
    for record in window.records(records):
        if "float" not in record.dtype or max(record.elems, record.output_elems) <= control:
            continue
        if record.kind in _REDUCING and record.detail.partition(" ")[0] in _SUMS:
            reduced.append(record)
        elif record.kind in _GATHERING:
            gathered.append(record)
    return Messages(reduced=tuple(reduced), gathered=tuple(gathered))
