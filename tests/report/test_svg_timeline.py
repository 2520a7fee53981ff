"""SVG timeline: every call is visible and every label readable."""

import re
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from zero_sim.findings.records import Finding
from zero_sim.report.svg_timeline import draw_timeline

FINDING = Finding(
    check="equality.grad", message="differs", rank=0, step=0, call_start=0, call_stop=4
)
BAR = re.compile(r'<rect x="([\d.]+)" y="(\d+)" width="([\d.]+)" height="9"')


def in_flight(count):
    """Return a program with this many calls in flight at a time, twice."""

    def program(rank):
        for _ in range(2):
            works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(count)]
            for work in works:
                work.wait()

    return program


@pytest.fixture
def drawn(world_of):
    def draw(count):
        world = world_of(2, timing="lazy")
        world.run(in_flight(count))
        picture, _ = draw_timeline(world.log, FINDING)
        return str(picture)

    return draw


def bars(picture):
    """Return spans of calls by lane, sorted from the left."""
    lanes = {}
    for x, y, width in BAR.findall(picture):
        lanes.setdefault(int(y), []).append((float(x), float(x) + float(width)))
    return {y: sorted(spans) for y, spans in lanes.items()}


@pytest.mark.parametrize("count", [1, 5, 8])
def test_calls_in_flight_together_have_separate_lanes(drawn, count):
    lanes = bars(drawn(count))
    assert len(lanes) == 2 * count
    assert sum(map(len, lanes.values())) == 2 * 2 * count


@pytest.mark.parametrize("count", [1, 5, 8, 20])
def test_calls_in_a_lane_do_not_overlap(drawn, count):
    for spans in bars(drawn(count)).values():
        # A call of zero length is drawn a little longer to be visible.
        assert all(end <= start + 1.5 for (_, end), (start, _) in pairwise(spans))


def test_ranks_do_not_share_lanes(drawn):
    tops = sorted(bars(drawn(20)))
    assert len(tops) == 2 * 8
    assert tops[8] - tops[7] > tops[1] - tops[0]


def test_axis_is_drawn_over_the_shaded_step(drawn):
    picture = drawn(1)
    assert picture.index('class="step"') < picture.index("time, in calls")


def test_suspects_are_marked_on_all_participating_ranks(world_of):
    world = world_of(2, timing="lazy")
    world.run(in_flight(3))
    picture, _ = draw_timeline(world.log, FINDING, suspects=[0])
    assert picture.count('class="ar suspect"') == 2
    assert picture.count('class="ar"') == 2 * 2 * 3 - 2
    assert "suspect</span>" in picture


def test_legend_omits_suspects_if_there_are_none(drawn):
    assert "suspect" not in drawn(2)
    assert "the bad step</span>" in drawn(2)


def test_harness_calls_are_drawn_only_as_suspects(world_of):
    world = world_of(2)

    def program(rank):
        dist.all_reduce(torch.ones(1))
        with world.pause_clock():
            dist.broadcast(torch.ones(1), 0)

    world.run(program)
    picture, said = draw_timeline(world.log, FINDING)
    assert said == "all 2 calls"
    assert "broadcast" not in str(picture)
    picture, _ = draw_timeline(world.log, FINDING, suspects=world.log.harness)
    assert "broadcast" in str(picture)
