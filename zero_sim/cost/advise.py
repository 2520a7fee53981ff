"""Advice: the stage, copies and bucket size that fit into a rank's memory and are fastest.

Every candidate is weighed by the closed forms: what does not fit is ruled out with what it takes,
what fits is ordered by the time of a step. Of those that are as fast the simpler one comes first:
the lower stage, fewer copies, larger buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zero_sim.cost.counted import Model, Stage
from zero_sim.cost.footprint import Footprint, footprint_of
from zero_sim.cost.network import Network
from zero_sim.cost.step_time import StepTime, step_time
from zero_sim.cost.traffic import traffic_of
from zero_sim.scenario.conditions import keep_evenly
from zero_sim.scenario.spec import Scenario

STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
_BUCKETS_MOST = 256
"""Into how many buckets a model is cut at most; each further size is four times as large."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to train, and what it costs."""

    stage: Stage
    redundancy: int
    bucket_elems: int | None
    """None for one bucket a buffer."""
    reshard_after_forward: bool
    footprint: Footprint
    activations: int
    """Bytes that were said to come on top."""
    time: StepTime
    between: float
    """Bytes that a rank sends between nodes."""
    limit: int
    """Bytes that a rank has."""

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment."""
        return self.footprint.peak + self.activations

    @property
    def fits(self) -> bool:
        """Whether they are there."""
        return self.peak <= self.limit

    @property
    def why_not(self) -> str:
        """Why it was ruled out; empty where it fits."""
        if self.fits:
            return ""
        held = self.footprint.held
        moment = self.footprint.moments[self.footprint.peak_at]
        parts = sorted({**held, **moment, "activations": self.activations}.items(), key=_size)
        name, most = parts[-1]
        return (
            f"takes {self.peak / 1e9:,.1f} GB in {self.footprint.peak_at}, "
            f"{(self.peak - self.limit) / 1e9:,.1f} GB too many; most of it "
            f"{name.replace('_', ' ')}, {most / 1e9:,.1f} GB"
        )

    def as_dict(self) -> dict[str, object]:
        """Ready for JSON."""
        return {
            "stage": self.stage,
            "redundancy": self.redundancy,
            "bucket_elems": self.bucket_elems,
            "reshard_after_forward": self.reshard_after_forward,
            "peak": self.peak,
            "peak_at": self.footprint.peak_at,
            "bytes_between_nodes": math.ceil(self.between),
            "seconds": self.time.total,
            "exposed_seconds": self.time.exposed,
            "why_not": self.why_not,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """All candidates."""

    fitting: Sequence[Candidate]
    """The best first; of each stage and number of copies with its best bucket size."""
    ruled_out: Sequence[Candidate]
    """Of each stage and number of copies none of which fits, the smallest."""
    considered: int


def advise(
    model: Model,
    *,
    network: Network,
    limit: int,
    activations: int = 0,
    stages: Sequence[Stage] = STAGES,
    redundancies: Sequence[int] = (),
    buckets: Sequence[int | None] = (),
    has_masters: bool = True,
) -> Advice:
    """Weigh every candidate.

    Args:
        model: What is trained, and on how many ranks.
        network: What joins them, and how fast they compute.
        limit: Bytes that a rank has.
        activations: Bytes that activations take on top.
        stages: Those to choose from.
        redundancies: Copies to choose from; powers of two that divide the ranks where left out.
        buckets: Sizes in elements to choose from, None for one bucket a buffer.
        has_masters: Whether there are fp32 masters beside the params.
    """
    copies = redundancies or _redundancies(model.scenario.world.size)
    best: dict[tuple[Stage, int], Candidate] = {}
    considered = 0
    for stage, redundancy, bucket, reshard in _choices(model, stages, copies, buckets):
        chosen = model.with_choice(
            stage=stage,
            redundancy=redundancy,
            bucket_elems=bucket,
            reshard_after_forward=reshard,
            reshard_ranks=_kept_by(model.scenario, redundancy=redundancy) if reshard else None,
            overlap_grads=None,
            overlap_params=None,
        )
        considered += 1
        sizes, scenario = chosen.laid_out(), chosen.scenario
        traffic = traffic_of(sizes, scenario=scenario, rank=0, network=network)
        candidate = Candidate(
            stage=stage,
            redundancy=redundancy,
            bucket_elems=bucket,
            reshard_after_forward=reshard,
            footprint=footprint_of(sizes, scenario=scenario, rank=0, has_masters=has_masters),
            activations=activations,
            time=step_time(sizes, scenario=scenario, rank=0, network=network),
            between=float(traffic.sent_over(network.between.name)),
            limit=limit,
        )
        key = (stage, redundancy)
        if key not in best or _rank(candidate) < _rank(best[key]):
            best[key] = candidate
    weighed = sorted(best.values(), key=_rank)
    return Advice(
        fitting=[each for each in weighed if each.fits],
        ruled_out=[each for each in weighed if not each.fits],
        considered=considered,
    )


def _rank(candidate: Candidate) -> tuple[object, ...]:
    """What fits before what does not; then the faster, or the smaller, then the simpler."""
    simple = (candidate.stage, candidate.redundancy, -(candidate.bucket_elems or 2**63))
    if not candidate.fits:
        return (1, candidate.peak, *simple)
    return (0, candidate.time.total, *simple)


def _choices(
    model: Model, stages: Sequence[Stage], copies: Sequence[int], buckets: Sequence[int | None]
) -> Iterator[tuple[Stage, int, int | None, bool]]:
    sizes = buckets or _bucket_sizes(model.elems)
    for stage in stages:
        for redundancy in copies if stage else (1,):
            for bucket in sizes:
                yield stage, redundancy, bucket, True
                if stage == 3:
                    yield stage, redundancy, bucket, False


def _kept_by(scenario: Scenario, *, redundancy: int) -> int | None:
    """By how many ranks params are kept until backward, as the case says, if that goes."""
    keeping = scenario.system.reshard_ranks
    ranks, ep = scenario.world.size, scenario.topology.ep
    goes = keeping is not None and keep_evenly(keeping, ranks=ranks, redundancy=redundancy, ep=ep)
    return keeping if goes else None


def _redundancies(ranks: int) -> tuple[int, ...]:
    """The powers of two that divide the ranks; less than all of them shard something."""
    found = [1]
    while ranks % (found[-1] * 2) == 0 and found[-1] * 2 < ranks:
        found.append(found[-1] * 2)
    return tuple(found)


def _bucket_sizes(elems: int) -> tuple[int | None, ...]:
    sizes: list[int | None] = [None]
    parts = 4
    while parts <= _BUCKETS_MOST and elems // parts:
        sizes.append(-(-elems // parts))
        parts *= 4
    return tuple(sizes)


def _size(part: tuple[str, int]) -> int:
    return part[1]
