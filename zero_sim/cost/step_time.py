"""Time of a step by a simple model: one stream that computes, one that communicates.

Buckets are computed one after another, each for as long as its params say; a collective takes its
messages times latency, and its bytes over the bandwidth of its slowest link (`network.py`), and
starts when it is issued and all before it are done. So one call a param costs latencies, and one
call a buffer hides behind nothing; what lies between can be seen. What an optimizer computes is
left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from zero_sim.cost.calls import (
    PlannedCall,
    Purpose,
    calls_of_bucket,
    calls_of_few_numbers,
    calls_of_grads,
    calls_of_layers,
)
from zero_sim.cost.forms import BucketForm, ParamSize, by_registration
from zero_sim.cost.grad_forms import grad_forms
from zero_sim.cost.network import Network, route_of, seconds_of, sent_elems
from zero_sim.cost.traffic import WorldRanks, world_ranks_of
from zero_sim.scenario.overlap import overlaps_grads, overlaps_params
from zero_sim.scenario.spec import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The seconds of a step."""

    total: float
    compute: float
    communication: float
    """Of all collectives, one after another."""

    @property
    def exposed(self) -> float:
        """What of the communication nothing hides."""
        return self.total - self.compute


@dataclass(slots=True)
class _Streams:
    """Two clocks: when computing goes on, and when the stream of collectives is free."""

    now: float = 0.0
    free: float = 0.0
    compute: float = 0.0
    communication: float = 0.0

    def run(self, seconds: float) -> None:
        self.now += seconds
        self.compute += seconds

    def issue(self, seconds: float) -> float:
        """When what is issued now is done."""
        self.free = max(self.free, self.now) + seconds
        self.communication += seconds
        return self.free

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Costs:
    """Of one bucket: seconds of each of its collectives and of its computing."""

    moves: dict[Purpose, float]
    forward: float
    is_last: bool
    """Whether a forward needs it last of all that are sharded by as many ranks."""

    def of(self, purpose: Purpose) -> float:
        return self.moves.get(purpose, 0.0)


@dataclass(slots=True)
class _Step:
    """A step while it is played."""

    costs: Sequence[_Costs]
    scenario: Scenario
    streams: _Streams = field(default_factory=_Streams)
    gathered: dict[int, float] = field(default_factory=dict)
    """By bucket when its params are whole."""

    def play(self, few: float) -> None:
        scenario, streams = self.scenario, self.streams
        system, last = scenario.system, scenario.run.micro_batches - 1
        for micro in range(scenario.run.micro_batches):
            if micro == 0 and overlaps_params(system):
                self._spread()
                for index in range(len(self.costs)):
                    self._gather(index)
            self._forward()
            self._backward(reduces=system.sync == "every" or micro == last)
        streams.wait(streams.issue(few))
        for cost in self.costs:
            streams.wait(streams.issue(cost.of("whole")))
        if not overlaps_params(system):
            self._spread()
            if system.stage in (1, 2) or system.gather_after_step:
                for cost in self.costs:
                    streams.wait(streams.issue(cost.of("gather")))

    def _spread(self) -> None:
        for cost in self.costs:
            self.streams.wait(self.streams.issue(cost.of("spread")))

    def _gather(self, index: int, *, in_backward: bool = False) -> None:
        if index not in self.gathered:
            moves = self.costs[index].moves
            purpose: Purpose = "regather" if in_backward and "regather" in moves else "gather"
            self.gathered[index] = self.streams.issue(self.costs[index].of(purpose))

    def _forward(self) -> None:
        count, sharded = len(self.costs), self.scenario.system.stage == 3
        for index in range(count):
            if sharded:
                for ahead in range(index, min(count, index + 1 + self._prefetch)):
                    self._gather(ahead)
            self.streams.wait(self.gathered.get(index, 0.0))
            self.streams.run(self.costs[index].forward)
            frees = sharded and self.scenario.system.reshard_after_forward
            if frees and not self.costs[index].is_last:
                del self.gathered[index]

    def _backward(self, *, reduces: bool) -> None:
        system, streams = self.scenario.system, self.streams
        overlap, waiting = overlaps_grads(system), []
        for index in range(len(self.costs))[::-1]:
            cost = self.costs[index]
            if system.stage == 3:
                for ahead in range(index, max(-1, index - 1 - self._prefetch), -1):
                    self._gather(ahead, in_backward=True)
                streams.wait(self.gathered.pop(index))
            streams.run(2 * cost.forward)
            if not reduces:
                continue
            if overlap or system.stage >= 2:
                done = streams.issue(cost.of("sum"))
                if not overlap:
                    streams.wait(done)
            else:
                waiting.append(cost.of("sum"))
        for seconds in waiting:
            streams.wait(streams.issue(seconds))
        if reduces:
            # Sums over copies of the shards come behind those inside the blocks.
            for cost in self.costs:
                streams.issue(cost.of("copies"))
        streams.wait(streams.free)
        self.gathered.clear()

    @property
    def _prefetch(self) -> int:
        ahead = self.scenario.system.prefetch
        return 1 if ahead is None else ahead


def step_time(
    sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int, network: Network
) -> StepTime:
    """The time of one step of one rank, the steps before and behind it being alike.

    Args:
        sizes: The params that the rank trains, in registration order.
        scenario: The case as its dp-cp group sees it.
        rank: Rank in that group.
        network: Links, and how fast ranks compute.
    """
    place = world_ranks_of(scenario, rank=rank)
    known: dict[BucketForm, _Costs] = {}
    costs = []
    for form in by_registration(sizes, scenario=scenario, rank=rank):
        # Buckets that are alike but for their names cost alike.
        key = _unnamed(form)
        if key not in known:
            known[key] = _costs_of(form, scenario, rank=rank, network=network, place=place)
        costs.append(known[key])
    costs = _with_grad_units(costs, sizes, scenario, rank=rank, network=network, place=place)
    few = calls_of_few_numbers(sizes, scenario=scenario, rank=rank)
    few += calls_of_layers(scenario, rank=rank)
    step = _Step(costs=costs, scenario=scenario)
    step.play(sum(_moves(few, network=network, place=place).values()))
    streams = step.streams
    return StepTime(
        total=max(streams.now, streams.free),
        compute=streams.compute,
        communication=streams.communication,
    )


def _unnamed(form: BucketForm) -> BucketForm:
    return replace(form, names=(), starts=())


def _costs_of(
    form: BucketForm, scenario: Scenario, *, rank: int, network: Network, place: WorldRanks
) -> _Costs:
    calls = calls_of_bucket(form, scenario=scenario, rank=rank, sums=1)
    # Each call once, however often a step repeats it; chunks are as many calls, and so is what an
    # optimizer needs of whole params, one after the other.
    once = {
        call: 1 if form.chunk_elems is None and call.purpose != "whole" else count
        for call, count in calls.items()
    }
    moves = _moves(Counter(once), network=network, place=place)
    compute = network.compute
    forward = 0.0 if compute is None else compute.forward_seconds(form.payload_elems)
    return _Costs(moves=moves, forward=forward, is_last=form.is_last)


def _with_grad_units(
    costs: Sequence[_Costs],
    sizes: Sequence[ParamSize],
    scenario: Scenario,
    *,
    rank: int,
    network: Network,
    place: WorldRanks,
) -> list[_Costs]:
    """Add what goes through reduce buffers to the bucket of the last gradient of each."""
    buckets = by_registration(sizes, scenario=scenario, rank=rank)
    index_of = {name: index for index, form in enumerate(buckets) for name in form.names}
    added = list(costs)
    for form in grad_forms(sizes, scenario=scenario, rank=rank):
        calls = calls_of_grads(form, scenario=scenario, rank=rank, sums=1)
        seconds = _moves(calls, network=network, place=place)["sum"]
        index = index_of[form.names[-1]]
        moves: dict[Purpose, float] = dict(added[index].moves)
        moves["sum"] = moves.get("sum", 0.0) + seconds
        added[index] = replace(added[index], moves=moves)
    return added


def _moves(
    calls: Counter[PlannedCall], *, network: Network, place: WorldRanks
) -> dict[Purpose, float]:
    """Seconds of calls by what they are for, one after another."""
    moves: dict[Purpose, float] = {}
    for call, count in calls.items():
        seconds = _seconds(call.kind, call.bytes, place(call.among, call.ranks), network=network)
        moves[call.purpose] = moves.get(call.purpose, 0.0) + count * seconds
    return moves


def _seconds(kind: str, contributed: int, ranks: Sequence[int], *, network: Network) -> float:
    route = route_of(ranks, network=network, kind=kind)
    sent = float(sent_elems(kind, contributed, len(ranks)))
    return seconds_of(kind, sent, route, network=network)
