"""Nodes, links, rings, and topology files."""

from fractions import Fraction

import pytest

from zero_sim.calculators.network import Network, messages, part_between, sent_elems
from zero_sim.calculators.network_file import load_network, parse_network
from zero_sim.errors import ScenarioError

TWO_A_NODE = Network(ranks_per_node=2, cards=1)


def test_ring_by_node_leaves_each_node_once():
    between = part_between(range(8), network=TWO_A_NODE, kind="all_reduce")
    assert between == Fraction(4, 8)


def test_ring_across_avoids_neighbors_on_the_same_node():
    across = Network(ranks_per_node=2, cards=1, ring="across")
    assert part_between(range(8), network=across, kind="all_gather") == 1
    # Three of four ranks share a node, so two of four steps stay inside.
    uneven = Network(ranks_per_node=3, ring="across")
    assert part_between(range(4), network=uneven, kind="all_gather") == Fraction(1, 2)


def test_group_on_one_node_needs_no_card():
    assert part_between((0, 1), network=TWO_A_NODE, kind="all_reduce") == 0


def test_all_to_all_sends_to_every_other_rank():
    # One of the three other ranks is on the node.
    assert part_between(range(4), network=TWO_A_NODE, kind="all_to_all") == Fraction(2, 3)


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


def test_topology_file_is_loaded(tmp_path):
    path = tmp_path / "links.toml"
    path.write_text('ranks_per_node = 2\nring = "across"\ninside = "bus"\n')
    wanted = Network(ranks_per_node=2, cards=2, ring="across", inside="bus", between="nic")
    assert load_network(path) == wanted


def test_all_mistakes_are_reported_at_once():
    raw = {
        "ranks_per_nod": 8,
        "ranks_per_node": 0,
        "ring": "round",
        "inside": "",
        "between": {"cards": 3},
        "cards": True,
        "gigabytes_per_second": 3.0,
    }
    with pytest.raises(ScenarioError) as caught:
        parse_network(raw, source="links.toml")
    told = str(caught.value)
    assert told.startswith("links.toml: 7 problems")
    for path in (
        "ranks_per_nod: unknown field. Did you mean 'ranks_per_node'?",
        "ranks_per_node: expected a whole number of at least 1",
        "ring: expected 'by-node' or 'across', got 'round'",
        "inside: expected 1 to 40 characters",
        "between: expected 1 to 40 characters that can be printed, got {'cards': 3}",
        "cards: expected a whole number",
        "gigabytes_per_second: unknown field. Known: ranks_per_node, inside",
    ):
        assert path in told


def test_links_with_equal_names_are_refused():
    with pytest.raises(ScenarioError, match="between: expected a name different from"):
        parse_network({"inside": "x", "between": "x"}, source="links.toml")


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(ScenarioError, match="got nothing at this path"):
        load_network(tmp_path / "none.toml")
