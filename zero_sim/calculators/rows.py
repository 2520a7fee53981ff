"""Table rows for the calculators: a rank's memory and traffic for a sharded model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_sim.calculators.counted import Model, Stage
from zero_sim.calculators.footprint import Footprint, footprint_of, single_device
from zero_sim.calculators.network import Network
from zero_sim.calculators.traffic import Flow, Traffic, traffic_of

CURVE_RANKS = tuple(2**power for power in range(15))
"""Numbers of ranks in a curve: powers of two up to 16,384."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRow:
    """A rank's memory."""

    model: str
    params: int
    ranks: int
    stage: int
    redundancy: int
    bucket_elems: int | None
    footprint: Footprint
    unsharded: int
    """Bytes between two steps at stage 0, including its gradient buffer."""
    one_device: int
    """Bytes between two steps on one device that frees gradients after a step."""

    @property
    def saved(self) -> float:
        """Saved part compared with stage 0, at most 1."""
        return 1 - self.footprint.total / self.unsharded if self.unsharded else 0.0

    @property
    def saved_of_one_device(self) -> float:
        """Saved part compared with one device, at most 1; negative if the rank needs more."""
        return 1 - self.footprint.total / self.one_device if self.one_device else 0.0

    def as_dict(self) -> dict[str, object]:
        """Return the row for JSON."""
        footprint = self.footprint
        return {
            "model": self.model,
            "params": self.params,
            "ranks": self.ranks,
            "stage": self.stage,
            "redundancy": self.redundancy,
            "bucket_elems": self.bucket_elems,
            "bytes_per_rank": {**footprint.held, "total": footprint.total},
            # A part of the total, not added to it.
            "on_cpu": footprint.on_cpu,
            "within_step": {name: dict(extra) for name, extra in footprint.moments.items()},
            "peak": footprint.peak,
            "peak_at": footprint.peak_at,
            "saved": self.saved,
            "saved_of_one_device": self.saved_of_one_device,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficRow:
    """A rank's traffic in a step."""

    model: str
    params: int
    ranks: int
    stage: int
    redundancy: int
    bucket_elems: int | None
    traffic: Traffic

    def as_dict(self) -> dict[str, object]:
        """Return the row for JSON."""
        traffic = self.traffic
        by_kind = traffic.by_kind()
        links = (traffic.network.inside, traffic.network.between)
        # Each total is rounded up once, so it may be below the sum of its rounded parts.
        totals = {link: math.ceil(traffic.sent_over(link)) for link in links}
        return {
            "model": self.model,
            "params": self.params,
            "ranks": self.ranks,
            "stage": self.stage,
            "redundancy": self.redundancy,
            "bucket_elems": self.bucket_elems,
            "bytes_sent_per_rank": {**by_kind, "total": totals},
            "total": math.ceil(traffic.sent),
            "bytes_sent_per_card": math.ceil(traffic.sent_per_card),
            "calls": sum(flow.calls for flow in traffic.flows),
            "messages": sum(flow.messages for flow in traffic.flows),
            "flows": [_flow_dict(flow) for flow in traffic.flows],
        }


def _flow_dict(flow: Flow) -> dict[str, object]:
    return {
        "kind": flow.kind,
        "group": flow.group,
        "ranks": flow.ranks,
        "dtype": flow.dtype,
        "calls": flow.calls,
        "messages": flow.messages,
        "contributed_bytes": flow.contributed_bytes,
        "sent_bytes": {link: math.ceil(sent) for link, sent in flow.sent.items()},
    }


def choices(
    models: Sequence[Model],
    *,
    ranks: Sequence[int] = (),
    stages: Sequence[Stage] = (),
    redundancies: Sequence[int] = (),
    **system: Any,
) -> Iterator[Model]:
    """Yield each model with each combination of the given settings.

    Args:
        models: Models. If an argument is empty, their own setting is used.
        ranks: Sizes of the dp-cp group.
        stages: ZeRO stages.
        redundancies: Numbers of replicas.
        system: Other fields of `SystemSpec`, for all models.
    """
    for model in models:
        for size in ranks or (model.scenario.world.size,):
            for stage in stages or (model.scenario.system.stage,):
                copies = redundancies or (model.scenario.system.redundancy,)
                # Stage 0 shards nothing, so it has no replicas of shards.
                for redundancy in copies if stage else (1,):
                    yield model.with_choice(
                        ranks=size, stage=stage, redundancy=redundancy, **system
                    )


def memory_row(model: Model, *, has_masters: bool = True, rank: int = 0) -> MemoryRow:
    """Return a rank's memory with the model's own settings."""
    scenario, sizes = model.scenario, model.laid_out()
    plain = model.with_choice(stage=0, redundancy=1)
    unsharded = footprint_of(
        plain.laid_out(), scenario=plain.scenario, rank=rank, has_masters=has_masters
    )
    return MemoryRow(
        model=scenario.name,
        params=model.elems,
        ranks=scenario.world.size,
        stage=scenario.system.stage,
        redundancy=scenario.system.redundancy,
        bucket_elems=scenario.system.bucket_elems,
        footprint=footprint_of(sizes, scenario=scenario, rank=rank, has_masters=has_masters),
        unsharded=unsharded.total,
        # torch's zero_grad() frees gradients by default.
        one_device=sum(alone(model, has_masters=has_masters)["gradients_freed"].values()),
    )


def traffic_row(model: Model, *, network: Network, rank: int = 0) -> TrafficRow:
    """Return a rank's traffic with the model's own settings."""
    scenario, sizes = model.scenario, model.laid_out()
    return TrafficRow(
        model=scenario.name,
        params=model.elems,
        ranks=scenario.world.size,
        stage=scenario.system.stage,
        redundancy=scenario.system.redundancy,
        bucket_elems=scenario.system.bucket_elems,
        traffic=traffic_of(sizes, scenario=scenario, rank=rank, network=network),
    )


def alone(model: Model, *, has_masters: bool = True) -> dict[str, Mapping[str, int]]:
    """Return the bytes on one device without buffers, with gradients freed and kept."""
    # Not laid_out(): without buckets there is no padding, so the total size is enough.
    return {
        name: single_device(
            model.sizes, scenario=model.scenario, keeps_grads=keeps, has_masters=has_masters
        )
        for name, keeps in (("gradients_freed", False), ("gradients_kept", True))
    }


def curve(
    model: Model, *, stages: Sequence[Stage] = (), redundancies: Sequence[int] = ()
) -> Iterator[Model]:
    """Yield a model on 1 to 16,384 ranks for each stage and redundancy."""
    ep, system = model.scenario.topology.ep, model.scenario.system
    for stage in stages or (system.stage,):
        for redundancy in (redundancies or (system.redundancy,)) if stage else (1,):
            for ranks in CURVE_RANKS:
                # Skip numbers that experts or replicas do not divide, because a curve needs no
                # error.
                if ranks % ep == 0 and ranks // ep % redundancy == 0:
                    yield model.with_choice(ranks=ranks, stage=stage, redundancy=redundancy)
