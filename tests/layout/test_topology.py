"""Coordinates and groups of ranks."""

import pytest

from zero_sim.errors import UsageError
from zero_sim.layout.topology import Topology


@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "pp-dp-cp-tp", "dp-tp-pp-cp"])
def test_coordinates_and_ranks_are_inverse(order):
    topology = Topology(tp=2, cp=3, dp=2, pp=2, order=order)
    places = [topology.coordinates(rank) for rank in range(24)]
    assert [topology.rank_of(**place) for place in places] == list(range(24))


def test_the_first_axis_of_the_order_varies_fastest():
    topology = Topology(tp=2, dp=2, order="tp-dp-cp-pp")
    assert [topology.coordinates(rank)["tp"] for rank in range(4)] == [0, 1, 0, 1]
    topology = Topology(tp=2, dp=2, order="dp-tp-cp-pp")
    assert [topology.coordinates(rank)["tp"] for rank in range(4)] == [0, 0, 1, 1]


def test_dp_cp_groups_at_fixed_tp_and_pp():
    topology = Topology(tp=2, cp=2, dp=2)
    assert topology.dp_cp_groups() == ((0, 2, 4, 6), (1, 3, 5, 7))
    topology = Topology(cp=2, dp=2, pp=2)
    assert topology.dp_cp_groups() == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_every_rank_is_in_one_group():
    topology = Topology(tp=3, cp=2, dp=2, pp=2, order="cp-tp-pp-dp")
    ranks = [rank for group in topology.dp_cp_groups() for rank in group]
    assert sorted(ranks) == list(range(24))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Topology(tp=0),
        lambda: Topology(dp=4, ep=3),
        lambda: Topology(order="tp-dp"),
        lambda: Topology(tp=2).coordinates(2),
        lambda: Topology(tp=2).rank_of(tp=2),
    ],
)
def test_impossible_topology_is_refused(make):
    with pytest.raises(UsageError, match="expected"):
        make()
