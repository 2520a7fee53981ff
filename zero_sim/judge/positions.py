"""Positions of elements in the calls that reduce them, which most orders of addition depend on.

The reference knows no buffers; where the order model needs positions, it is told them as facts that
were observed on the running system.
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
"""How communicators add, by the ranks of each, where that was observed."""


def members_of(
    ranks: Sequence[int], *, replica_count: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The communicators that sum what some ranks hold together.

    Args:
        ranks: All that hold some params.
        replica_count: Number of blocks that they are cut into.

    Returns:
        The ranks of each block, and for each shard the ranks that hold it, one of each block.
    """
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
    """Where every element of every param stands in the sums over the ranks.

    Args:
        places: What the ranks of one replica own, each element once.
        replica_count: Number of blocks of ranks, whose shards are summed by a second call: an
            all-reduce, or where blocks share the state what reduced the shards.
        ranks: All ranks that hold the params; only read where arrangements are given.
        arrangements: Of all communicators of three ranks or more; None where ranks add in order.

    Returns:
        By param, spans of its flattened elements.
    """
    spans: dict[str, list[SumSpan]] = {}
    blocks, shards = members_of(ranks, replica_count=replica_count) if arrangements else ([], [])
    seen = arrangements or {}

    def of(groups: Sequence[tuple[int, ...]]) -> tuple[Arrangement, ...]:
        # Two ranks add in one order only, whatever is said of them.
        return tuple(seen.get(group) or in_order(len(group)) for group in groups)

    for place in places:
        site = replace(_site_of(place), arrangements=of(blocks))
        over = _replica_site_of(place) if replica_count > 1 else None
        if over is not None and shards:
            whole = site.kind == "all_reduce"
            over = replace(over, arrangements=of([shards[0 if whole else site.ends_on]]))
        spans.setdefault(place.param, []).append(
            SumSpan(start=place.start, stop=place.stop, site=site, replica_site=over)
        )
    return spans


def check_reported(facts: Facts, *, scenario: Scenario, target_name: str) -> None:
    """Check that an engine tells all that the order of addition depends on.

    Args:
        facts: What a rank's engine says before the first step.
        scenario: The case, whose order of addition counts.
        target_name: Of the target that built it.

    Raises:
        UsageError: It does not, and the order depends on it.
    """
    world = scenario.world
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
        f"expected target {target_name!r} to tell where its gradients lie in the calls that "
        f"reduce them, because sums in world.order = {world.order!r} depend on it, got {got}. Try "
        "`parts` with places that tell it (zero_sim.targets.Place), or world.order = 'linear'."
    )


class _Unreported(UsageError):
    """An order depends on a field of a place that is not told."""

    def __init__(self, field: str, param: str) -> None:
        self.field = field
        self.param = param
        super().__init__(f"expected {field} of a place of param {param!r}, got None.")


def _site_of(place: Place) -> SumSite:
    shard, kind = _reported(place, "shard"), place.reduced_by
    if kind == "reduce_scatter_list":
        # Every rank's entry is a tensor of its own.
        return SumSite(kind="reduce_scatter_list", **_in_shard(place), ends_on=shard)
    return SumSite(
        kind=kind or "all_reduce",
        elems=_reported(place, "call_elems"),
        offset=_reported(place, "call_offset"),
        ends_on=0 if kind == "all_reduce" else shard,
        joined_elems=place.joined_elems,
        joined_offset=place.joined_offset,
    )


def _replica_site_of(place: Place) -> SumSite:
    if place.copies_at is None:
        return SumSite(kind="all_reduce", **_in_shard(place))
    elems, offset = place.copies_at
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
