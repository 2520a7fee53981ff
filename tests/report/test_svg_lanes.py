"""Swim lanes: arrows lead from waiting ranks to missing ranks."""

import re

import pytest
import torch
import torch.distributed as dist

from zero_sim.findings.records import Finding
from zero_sim.report.svg_lanes import RANKS_MAX, draw_lanes
from zero_sim.sim.failures import DataRace, Deadlock

LINE = re.compile(r'<line x1="([^"]+)" y1="(\d+)" x2="([^"]+)" y2="(\d+)"')
LANE = 34


def labels(picture):
    return re.findall(r'class="in">([^<]*)<', picture)


def arrows(picture):
    """Return pairs of lanes: of the waiting rank, and of the rank it waits for."""
    upright = [line for line in LINE.findall(picture) if line[0] == line[2]]
    return {(int(start) // LANE, int(stop) // LANE) for _, start, _, stop in upright}


@pytest.fixture
def stuck(world_of):
    """Draw the deadlock of a program."""

    def draw(size, program, *, check="world.deadlock"):
        world = world_of(size)
        with pytest.raises(Deadlock):
            world.run(program)
        return draw_lanes(world.log, Finding(check=check, message=""))

    return draw


def returns_early(rank):
    dist.all_reduce(torch.ones(4))
    if rank != 2:
        dist.broadcast(torch.ones(4), src=0)


@pytest.mark.parametrize("check", ["world.deadlock", "world.stalled-by-plan"])
def test_all_ranks_wait_for_the_rank_that_returned(stuck, check):
    picture = stuck(4, returns_early, check=check)
    assert arrows(picture) == {(0, 2), (1, 2), (3, 2)}
    waiting = ["all_reduce #0", "broadcast #1"]
    assert labels(picture) == [*waiting * 2, "all_reduce #0", "no more calls", *waiting]


def test_groups_in_different_orders_are_a_cycle(stuck):
    def program(rank):
        groups = [dist.new_group([0, 1], group_desc="g") for _ in range(2)]
        for group in groups if rank == 0 else groups[::-1]:
            dist.all_reduce(torch.ones(2), group=group)

    picture = stuck(2, program)
    assert arrows(picture) == {(0, 1), (1, 0)}
    first, second = labels(picture)
    assert first != second


def test_receives_without_sends_are_a_cycle(stuck):
    def program(rank):
        dist.recv(torch.ones(1), src=1 - rank)

    assert arrows(stuck(2, program)) == {(0, 1), (1, 0)}


def test_arrow_starts_at_the_awaited_call(stuck):
    def program(rank):
        if rank == 0:
            group, other = dist.new_group([0, 1]), dist.new_group([0, 2])
            work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
            dist.broadcast(torch.ones(1), src=0, group=other, async_op=True)
            work.wait()
        else:
            dist.new_group([0, 1]), dist.new_group([0, 2])

    picture = stuck(3, program)
    assert arrows(picture) == {(0, 1)}
    # The awaited call is at the right, although it was issued first.
    kinds = [label.partition(" ")[0] for label in labels(picture)]
    assert kinds == ["broadcast", "all_reduce", "no", "no"]


def test_absent_ranks_are_drawn_first(stuck):
    picture = stuck(12, lambda rank: dist.barrier() if rank != 11 else None)
    assert arrows(picture) == {(lane, RANKS_MAX - 1) for lane in range(RANKS_MAX - 1)}
    assert ">rank 11<" in picture
    assert "4 more ranks are not drawn" in picture


@pytest.fixture
def raced(world_of):
    def draw(program):
        world = world_of(2, races=True)
        with pytest.raises(DataRace) as caught:
            world.run(program)
        message = str(caught.value).partition("\n")[0]
        rank = caught.value.rank
        return draw_lanes(world.log, Finding(check="world.race", message=message, rank=rank))

    return draw


def test_race_is_drawn_with_its_call_and_access(raced):
    def program(rank):
        full = torch.ones(8)
        work = dist.all_reduce(full, async_op=True)
        dist.all_reduce(torch.ones(1))
        full.add_(rank)
        work.wait()

    assert labels(raced(program)) == [
        "all_reduce #0",
        "1 call",
        "no wait()",
        "aten::add_",
        "lent to the call, in flight",
    ]


def test_other_findings_have_no_lanes(world_of):
    world = world_of(2)
    world.run(lambda rank: dist.barrier())
    for check in ("equality.grad", "world.deadlock", "world.race"):
        assert draw_lanes(world.log, Finding(check=check, message="", rank=0)) is None
