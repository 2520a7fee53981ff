"""Element positions in reductions, as reported by engines.

Most orders of addition depend on these positions, and the reference has no buffers of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zero_sim.errors import UsageError
from zero_sim.judge.facts import Facts
from zero_sim.reference import POSITION_FREE, Arrangement, SumSite, SumSpan
from zero_sim.reference.arrangement import in_order
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import Place
from zero_sim.targets.adapt import PARTS

Arrangements = Mapping[tuple[int, ...], Arrangement]
"""Observed sum arrangements, by communicator ranks."""


def members_of(
    ranks: Sequence[int], *, replica_count: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the communicators that sum the gradients of shared params.

    Args:
        ranks: All ranks that hold the params.
        replica_count: Number of shard groups.

    Returns:
        The shard groups, and for each shard its ranks, one per shard group.
    """
    # Shard groups are consecutive ranks.
    share = len(ranks) // replica_count
    blocks = [tuple(ranks[start : start + share]) for start in range(0, len(ranks), share)]
    return blocks, [tuple(ranks[shard::share]) for shard in range(share)]


def sum_spans(
    places: Iterable[Place],
    *,
    replica_count: int,
    ranks: Sequence[int] = (),
    arrangements: Arrangements | None = None,
) -> dict[str, list[SumSpan]]:
    """Return each element's position in the sums over ranks.

    Args:
        places: Places of one replica, each element once.
        replica_count: Number of shard groups. A second call, an all-reduce, sums their shards.
        ranks: All ranks that hold the params; only needed with arrangements.
        arrangements: Arrangements for communicators of three or more ranks; None if ranks are
            added in order.

    Returns:
        Spans of the flattened param, by param.
    """
    spans: dict[str, list[SumSpan]] = {}
    blocks, shards = members_of(ranks, replica_count=replica_count) if arrangements else ([], [])
    seen = arrangements or {}

    def of(groups: Sequence[tuple[int, ...]]) -> tuple[Arrangement, ...]:
        # Two ranks have a single order, so their arrangement need not be observed.
        return tuple(seen.get(group) or in_order(len(group)) for group in groups)

    for place in places:
        site = replace(_site_of(place), arrangements=of(blocks))
        # The sum over replicas follows the sum in each shard group.
        over = _replica_site_of(place) if replica_count > 1 else None
        if over is not None and shards:
            # An all-reduce ends on all ranks, so use any shard's communicator.
            whole = site.kind == "all_reduce"
            over = replace(over, arrangements=of([shards[0 if whole else site.ends_on]]))
        spans.setdefault(place.param, []).append(
            SumSpan(start=place.start, stop=place.stop, site=site, replica_site=over)
        )
    return spans


def check_reported(facts: Facts, *, scenario: Scenario, target_name: str) -> None:
    """Check that an engine reports all positions that the order of addition depends on.

    Args:
        facts: Facts about a rank's engine.
        scenario: The case, with its order of addition.
        target_name: For the message.

    Raises:
        UsageError: If the order depends on a missing field.
    """
    world = scenario.world
    # Orders such as `linear` treat all elements alike, so positions do not matter.
    if not world.order_known or world.order in POSITION_FREE:
        return
    got = "an engine without `parts`"
    if PARTS not in facts.unreported:
        try:
            sum_spans(facts.places, replica_count=scenario.system.redundancy)
        except _Unreported as unreported:
            got = f"{unreported.field} = None for param {unreported.param!r}"
        else:
            return
    raise UsageError(
        f"expected target {target_name!r} to report the positions of its gradients in the calls "
        f"that reduce them, because sums in world.order = {world.order!r} depend on them, got "
        f"{got}. Implement `parts` with full places (zero_sim.targets.Place), or set "
        "world.order = 'linear'."
    )


class _Unreported(UsageError):
    """A place lacks a field that the order of addition depends on."""

    def __init__(self, field: str, param: str) -> None:
        self.field = field
        self.param = param
        super().__init__(f"expected {field} of a place of param {param!r}, got None.")


def _site_of(place: Place) -> SumSite:
    shard, kind = _reported(place, "shard"), place.reduced_by
    if kind == "reduce_scatter_list":
        # Each rank's entry is a separate tensor, so positions are within the shard.
        return SumSite(kind="reduce_scatter_list", **_in_shard(place), ends_on=shard)
    return SumSite(
        kind=kind or "all_reduce",
        elems=_reported(place, "call_elems"),
        offset=_reported(place, "call_offset"),
        # An all-reduce ends on all ranks, so the shard does not matter.
        ends_on=0 if kind == "all_reduce" else shard,
        joined_elems=place.joined_elems,
        joined_offset=place.joined_offset,
    )


def _replica_site_of(place: Place) -> SumSite:
    if place.replica_sum_at is None:
        # By default, replicas sum the shard alone.
        return SumSite(kind="all_reduce", **_in_shard(place))
    elems, offset = place.replica_sum_at
    return SumSite(kind="all_reduce", elems=elems, offset=offset)


def _in_shard(place: Place) -> dict[str, Any]:
    start = _reported(place, "shard_start")
    return {
        "elems": _reported(place, "shard_stop") - start,
        "offset": _reported(place, "flat_start") - start,
    }


def _reported(place: Place, field: str) -> int:
    value: int | None = getattr(place, field)
    if value is None:
        raise _Unreported(field, place.param)
    return value
