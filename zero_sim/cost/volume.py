"""Volume of communication: closed forms of the textbook's ZeRO against the calls of a step.

A stage that reduces more than it has to, gathers twice or sends elements that belong to nobody has
the right numbers and the wrong cost. The closed forms follow from the scenario and the sizes of the
params alone; they share no code with the layout that they judge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zero_sim.cost.forms import Call, ParamSize, bucket_forms, in_words
from zero_sim.findings.records import Finding
from zero_sim.scenario.checks import Check
from zero_sim.scenario.copies import state_copies
from zero_sim.scenario.spec import Scenario
from zero_sim.sim import CollectiveRecord

NORM_ELEMS = 3
"""What ranks tell each other for the norm: sum of squares, zeros, overflows."""


def calls_of_step(
    sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int, skipped: bool
) -> Counter[Call]:
    """What one rank has to call in one step, in whatever order.

    Args:
        sizes: The params that the rank trains, in registration order.
        scenario: The case as its dp-cp group sees it.
        rank: Rank in that group.
        skipped: Whether the step was, so that nothing was gathered.
    """
    system, world_size = scenario.system, scenario.world.size
    calls: Counter[Call] = Counter({("all_reduce", world_size, NORM_ELEMS): 1})
    parts = scenario.topology.tp * scenario.topology.pp
    if parts > 1:
        calls["all_reduce", parts, NORM_ELEMS] += 1
    if system.divide_by == "tokens":
        calls["all_reduce", world_size, 1] += 1
    sums = scenario.run.micro_batches if system.sync == "every" else 1
    for form in bucket_forms(sizes, scenario=scenario, rank=rank):
        calls[form.sum_call] += sums
        if not form.is_sharded:
            continue
        if form.copies_call is not None:
            calls[form.copies_call] += sums
        calls[form.gather_call] += _gathers(scenario, is_last=form.is_last, skipped=skipped)
        if form.spread_call is not None and not skipped:
            calls[form.spread_call] += 1
    if system.stage and not skipped:
        calls += _scale_calls(sizes, scenario=scenario)
    return +calls


def _gathers(scenario: Scenario, *, is_last: bool, skipped: bool) -> int:
    """How often a bucket's params are gathered in a step.

    Stages 1 and 2: once, after the update. Stage 3: in every micro-batch before forward, and before
    backward unless they were kept since; the bucket that a forward needs last always is.
    """
    system = scenario.system
    if system.stage < 3:
        return 0 if skipped else 1
    kept = is_last or not system.reshard_after_forward
    return scenario.run.micro_batches * (1 if kept else 2)


def _scale_calls(sizes: Sequence[ParamSize], *, scenario: Scenario) -> Counter[Call]:
    """One maximum over the shards of each kind that has params in fp8, an element a param."""
    calls: Counter[Call] = Counter()
    for kind, ways in (("dense", 1), ("expert", scenario.topology.ep)):
        count = sum(size.kind == kind and size.dtype.startswith("torch.float8") for size in sizes)
        if count:
            holders = scenario.world.size // ways
            calls["all_reduce", holders // state_copies(scenario.system), count] += 1
    return calls


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

    def records(self, log: Sequence[CollectiveRecord]) -> Iterator[CollectiveRecord]:
        """What the rank called in the step."""
        for index in range(self.start, self.stop):
            record = log[index]
            is_own = record.rank == self.world_rank and record.kind != "barrier"
            if is_own and not any(start <= index < stop for start, stop in self.looked):
                yield record


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
            yield Finding(
                check=Check.INVARIANT_VOLUME,
                step=window.step,
                rank=window.world_rank,
                message="this rank's collectives of the step are not those of the closed form: "
                f"{_difference(made, forms[key])}",
            )
            return


def _difference(made: Counter[Call], owed: Counter[Call]) -> str:
    parts = [f"{_listed(made - owed)} too many" if made - owed else ""]
    parts.append(f"{_listed(owed - made)} missing" if owed - made else "")
    return "; ".join(part for part in parts if part)


def _listed(calls: Counter[Call]) -> str:
    return ", ".join(f"{count} x {in_words(call)}" for call, count in sorted(calls.items()))
