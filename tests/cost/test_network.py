"""Nodes, links, rings, and the files that tell of them."""

from fractions import Fraction

import pytest

from zero_sim.cost.network import Link, Network, messages, route_of, seconds_of, sent_elems
from zero_sim.cost.network_file import load_network, parse_network
from zero_sim.errors import ScenarioError

TWO_A_NODE = Network(ranks_per_node=2, cards=1)


def test_a_ring_by_node_leaves_each_node_once():
    route = route_of(range(8), network=TWO_A_NODE, kind="all_reduce")
    assert (route.between, route.flows) == (Fraction(4, 8), 1)


def test_a_ring_across_has_no_neighbour_on_its_node_as_far_as_that_can_be():
    across = Network(ranks_per_node=2, cards=1, ring="across")
    assert route_of(range(8), network=across, kind="all_gather").between == 1
    # Three of four ranks on one node: of four steps two stay there.
    uneven = Network(ranks_per_node=3, ring="across")
    assert route_of(range(4), network=uneven, kind="all_gather").between == Fraction(1, 2)


def test_a_group_on_one_node_needs_no_card():
    assert route_of((0, 1), network=TWO_A_NODE, kind="all_reduce").between == 0


def test_an_all_to_all_goes_to_every_other_rank():
    route = route_of(range(4), network=TWO_A_NODE, kind="all_to_all")
    # Of three others one is on the node.
    assert route.between == Fraction(2, 3)


@pytest.mark.parametrize(
    ("kind", "elems"),
    [
        ("all_reduce", Fraction(2 * 12 * 3, 4)),
        ("reduce_scatter", Fraction(12 * 3, 4)),
        ("all_gather", 12 * 3),
        ("all_to_all", Fraction(12 * 3, 4)),
        ("send", 12),
        ("recv", 0),
        ("barrier", 0),
    ],
)
def test_elements_that_a_rank_sends(kind, elems):
    assert sent_elems(kind, 12, 4) == elems


def test_one_rank_sends_nothing():
    assert sent_elems("all_reduce", 12, 1) == messages("all_gather", 1) == 0


def test_the_time_of_a_ring_is_that_of_its_messages_on_its_slowest_link():
    fast, slow = (
        Link(name="a", gigabytes_per_second=100.0, microseconds=1.0),
        Link(name="b", gigabytes_per_second=10.0, microseconds=5.0),
    )
    network = Network(ranks_per_node=4, inside=fast, between=slow, cards=1)
    inside = route_of(range(4), network=network, kind="all_reduce")
    assert seconds_of("all_reduce", 6e9, inside, network=network) == 6 * (1e-6 + 1e9 / 100e9)
    both = route_of(range(8), network=network, kind="all_reduce")
    assert seconds_of("all_reduce", 14e9, both, network=network) == 14 * (5e-6 + 1e9 / 10e9)


def test_groups_that_leave_a_node_together_share_its_cards():
    """Four rings, each with a rank on both nodes, and two cards a node."""
    link = Link(name="b", gigabytes_per_second=10.0, microseconds=0.0)
    network = Network(ranks_per_node=4, between=link, cards=2)
    route = route_of((0, 4), network=network, kind="all_reduce")
    assert route.flows == 4
    assert seconds_of("all_reduce", 2e9, route, network=network) == 2 * (2 * 1e9 / 10e9)


GOOD = """
ranks_per_node = 2
ring = "across"
[inside]
name = "bus"
gigabytes_per_second = 300
microseconds = 2.5
[between]
gigabytes_per_second = 12.5
microseconds = 0
[compute]
teraflops = 100
tokens = 2048
"""


def test_a_topology_file(tmp_path):
    path = tmp_path / "links.toml"
    path.write_text(GOOD)
    network = load_network(path)
    assert (network.ranks_per_node, network.ring, network.cards) == (2, "across", 2)
    assert network.inside == Link(name="bus", gigabytes_per_second=300, microseconds=2.5)
    assert network.between.name == "nic"
    assert network.compute.tokens == 2048
    # Two operations a param and token.
    assert network.compute.forward_seconds(10**9) == 2 * 1e9 * 2048 / 100e12


def test_all_mistakes_are_told_at_once():
    raw = {
        "ranks_per_nod": 8,
        "ranks_per_node": 0,
        "ring": "round",
        "inside": {"gigabytes_per_second": -1, "name": ""},
        "between": {"microseconds": float("nan"), "cards": True},
        "compute": {"teraflops": "many"},
    }
    with pytest.raises(ScenarioError) as caught:
        parse_network(raw, source="links.toml")
    told = str(caught.value)
    assert told.startswith("links.toml: 10 problems")
    for path in (
        "ranks_per_nod: unknown field. Did you mean 'ranks_per_node'?",
        "ranks_per_node: expected a whole number of at least 1",
        "ring: expected 'by-node' or 'across', got 'round'",
        "inside.gigabytes_per_second: expected a number of more than 0",
        "inside.name: expected 1 to 40 characters",
        "between.microseconds: expected a number of at least 0",
        "between.cards: expected a whole number",
        "between.gigabytes_per_second: missing",
        "compute.teraflops: expected a number of more than 0",
        "compute.tokens: missing",
    ):
        assert path in told


def test_two_links_of_one_name_are_refused():
    link = {"name": "x", "gigabytes_per_second": 1, "microseconds": 1}
    with pytest.raises(ScenarioError, match=r"between\.name: expected another name"):
        parse_network({"inside": link, "between": link}, source="links.toml")


def test_a_table_that_is_none():
    with pytest.raises(ScenarioError, match="inside: expected a table, got 3"):
        parse_network({"inside": 3}, source="links.toml")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ScenarioError, match="got nothing at this path"):
        load_network(tmp_path / "none.toml")
