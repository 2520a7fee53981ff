"""Text and HTML representations of a world and its log."""

import pytest
import torch
import torch.distributed as dist

from zero_sim import World


@pytest.fixture(scope="module")
def world():
    with World(2) as world:
        world.run(lambda rank: dist.all_reduce(torch.zeros(3)))
        yield world


def test_a_log_counts_its_calls(world):
    assert repr(world.log).startswith("EventLog(2 calls of 2 ranks, ")


def test_a_world_shows_its_size_order_and_calls(world):
    assert repr(world) == "World(2 ranks, order=linear, 2 calls in the latest run)"


def test_a_notebook_shows_a_table_of_calls(world):
    table = world._repr_html_()
    assert table.count("<tr>") == 1 + 2
    assert "<td>all_reduce</td>" in table


def test_names_of_a_program_are_escaped_in_the_table(world):
    record = world.log.collectives[0]
    world.log.collectives.append(record._replace(group="<script>"))
    assert "<script>" not in world._repr_html_()
    world.log.collectives.pop()
