"""Grad units: gradients that share a reduce buffer, and the owners of their elements."""

from __future__ import annotations

import pytest

from zero_sim.layout import LayoutPolicy, ParamSpec, Span, plan_buffers, plan_grad_units


def units(sizes, *, elems, shards=2, partition="uneven", lanes=None, groups=None, **policy):
    """Plan params of these sizes; their gradients arrive in reverse order."""
    groups = groups or [0] * len(sizes)
    specs = [
        ParamSpec(name=f"p{i}", shape=(n,), dtype="fp32", group=group)
        for i, (n, group) in enumerate(zip(sizes, groups, strict=True))
    ]
    plans = plan_buffers(
        specs, policy=LayoutPolicy(shard_count=shards, partition=partition, **policy)
    )
    return plan_grad_units(
        plans,
        lanes=lanes or ["dense"] * len(plans),
        arrivals=[spec.name for spec in specs][::-1],
        buffer_elems=elems,
    )


def members(plans):
    return [[grad.name for grad in unit.grads] for unit in plans]


def runs(unit):
    return [(run.shard, run.span.numel) for run in unit.runs]


@pytest.mark.parametrize(
    ("elems", "expected"),
    [
        (1, [["p2"], ["p1"], ["p0"]]),
        (4, [["p2", "p1"], ["p0"]]),
        (5, [["p2", "p1"], ["p0"]]),
        (6, [["p2", "p1", "p0"]]),
    ],
)
def test_unit_takes_as_many_gradients_as_fit(elems, expected):
    """The last unit contains the rest; a gradient is never cut."""
    assert members(units([2, 3, 1], elems=elems)) == expected


def test_large_gradient_has_its_own_unit():
    """The unit before it may be half full, and the next gradient starts a new buffer."""
    plans = units([1, 9, 1], elems=4)
    assert members(plans) == [["p2"], ["p1"], ["p0"]]
    assert [unit.is_large for unit in plans] == [False, True, False]


def test_empty_params_are_in_no_unit():
    assert members(units([0, 2, 0], elems=4)) == [["p1"]]


def test_runs_join_neighbors_with_one_owner():
    """p0 has elements 0 to 4, p1 5 to 7; the cut between two ranks is after element 3."""
    (unit,) = units([5, 3], elems=8)
    assert runs(unit) == [(1, 3), (0, 4), (1, 1)]
    assert [grad.span for grad in unit.grads] == [Span(0, 3), Span(3, 8)]


def test_run_may_span_two_params():
    (unit,) = units([2, 1, 1], elems=8)
    assert runs(unit) == [(1, 2), (0, 2)]


def test_padding_is_in_no_unit():
    (unit,) = units([3, 2], elems=8, shards=4, partition="padded", align_elems=4)
    assert unit.numel == 5


def test_rank_without_elements_has_no_run():
    (unit,) = units([2], elems=8, shards=4)
    assert runs(unit) == [(0, 1), (1, 1)]


def test_param_groups_share_buffers_but_not_lanes():
    """A reduce buffer takes gradients of several flat buffers if they have a lane in common."""
    together = units([2, 2, 2], elems=8, groups=[0, 1, 0])
    assert members(together) == [["p2", "p1", "p0"]]
    apart = units([2, 2, 2], elems=8, groups=[0, 1, 0], lanes=["a", "b"])
    assert members(apart) == [["p1"], ["p2", "p0"]]


@pytest.mark.parametrize("partition", ["padded", "uneven", "one-owner"])
@pytest.mark.parametrize("elems", [1, 3, 7, 100])
def test_every_element_is_in_one_run_of_its_owner(partition, elems):
    sizes = [5, 1, 0, 7, 3]
    plans = units(sizes, elems=elems, shards=3, partition=partition, bucket_elems=6)
    assert sum(unit.numel for unit in plans) == sum(sizes)
    for unit in plans:
        ends = [run.span.stop for run in unit.runs]
        assert [run.span.start for run in unit.runs] == [0, *ends[:-1]]
        assert ends[-1] == unit.numel
