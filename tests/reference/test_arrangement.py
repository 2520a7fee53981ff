"""Arrangements of NCCL's communicators, compared with the steps of its source."""

import json
import math
from itertools import pairwise

import pytest
import torch

from zero_sim.reference.adding import SumSite, SumSpan, add_ranks, add_replicas
from zero_sim.reference.arrangement import (
    ADD,
    Arrangement,
    channel_parts,
    in_order,
    pat_together,
    pat_tree,
    pieces,
)

MIB = 1 << 20


def shown(tree):
    """Return a tree as text with brackets, in its order of addition."""
    stack = []
    for step in tree:
        if step == ADD:
            right = stack.pop()
            stack.append(f"({stack.pop()}+{right})")
        else:
            stack.append(str(step))
    return stack[0]


def ring_by_steps(ring, elems, elem_bytes):
    """Simulate NCCL's ring loop; return each element's sum as text."""
    count = len(ring)
    chunk = 2 * MIB // elem_bytes
    done, text = 0, [""] * elems
    while done < elems:
        left = elems - done
        size = chunk
        if left < chunk * count:
            even, step = math.ceil(left / count), 16 // elem_bytes
            size = math.ceil(even / step) * step
        # Position p first sends chunk p - 1, then each received sum with its own values added.
        on_the_way = {place: (place - 1) % count for place in range(count)}
        sums = {place: str(ring[place]) for place in range(count)}
        for _ in range(count - 1):
            arriving = {(place + 1) % count: sums[place] for place in range(count)}
            on_the_way = {(place + 1) % count: on_the_way[place] for place in range(count)}
            sums = {place: f"({arriving[place]}+{ring[place]})" for place in range(count)}
        for place, which in on_the_way.items():
            first = done + which * size
            for element in range(first, min(first + size, elems)):
                text[element] = sums[place]
        done += chunk * count
    return text


@pytest.mark.parametrize("ring", [(0, 1, 2), (0, 2, 1), (0, 3, 1, 4, 2)])
@pytest.mark.parametrize("elems", [1, 7, 40])
def test_ring_of_any_ranks_adds_as_simulated(ring, elems):
    arrangement = Arrangement(rings=(ring,))
    got = [""] * elems
    for start, stop, tree in pieces(
        arrangement, kind="all_reduce", elems=elems, elem_bytes=4, ends_on=0
    ):
        got[start:stop] = [shown(tree)] * (stop - start)
    assert got == ring_by_steps(ring, elems, 4)


def test_ring_loops_by_two_mebibytes_per_rank():
    ring, elem_bytes = (0, 2, 1), 4
    chunk = 2 * MIB // elem_bytes
    elems = 3 * chunk + 10
    runs = list(
        pieces(
            Arrangement(rings=(ring,)),
            kind="all_reduce",
            elems=elems,
            elem_bytes=elem_bytes,
            ends_on=0,
        )
    )
    starts = [start for start, _, _ in runs]
    # The rest of 10 elements is cut into chunks of 4.
    assert starts == [0, chunk, 2 * chunk, 3 * chunk, 3 * chunk + 4, 3 * chunk + 8]
    assert [shown(tree) for _, _, tree in runs[:3]] == ["((2+1)+0)", "((1+0)+2)", "((0+2)+1)"]
    assert [tree for _, _, tree in runs[3:]] == [tree for _, _, tree in runs[:3]]


def test_ranks_in_order_give_the_nccl_ring_order():
    generator = torch.Generator().manual_seed(1)
    for count, elems, kind in [(5, 40, "all_reduce"), (4, 40, "reduce_scatter")]:
        parts = [torch.randn(elems, generator=generator) for _ in range(count)]
        sums = []
        for arrangements in ((), (in_order(count),)):
            share = elems // count
            spans = [
                SumSpan(
                    start=start,
                    stop=stop,
                    site=SumSite(
                        kind=kind,
                        elems=elems,
                        offset=start,
                        ends_on=rank,
                        arrangements=arrangements,
                    ),
                )
                for rank, (start, stop) in enumerate(
                    [(0, elems)]
                    if kind == "all_reduce"
                    else [(rank * share, rank * share + share) for rank in range(count)]
                )
            ]
            sums.append(add_ranks(parts, order="nccl-ring", spans=spans))
        assert torch.equal(*sums)


def test_shard_groups_have_their_own_arrangements():
    parts = [torch.tensor([value]) for value in (0.0, 2.0**30, 1.0, -(2.0**30)) * 2]
    straight, turned = in_order(4), Arrangement(rings=((0, 1, 3, 2),))
    over = SumSite(kind="all_reduce", elems=1, offset=0, arrangements=(in_order(2),))

    def total(*blocks):
        site = SumSite(kind="all_reduce", elems=1, offset=0, arrangements=blocks)
        span = SumSpan(start=0, stop=1, site=site, replica_site=over)
        return add_replicas(parts, replica_count=2, order="nccl-ring", spans=[span]).item()

    # In order, the 1 is lost in (B + 1) - B; turned, it comes last and is added to B - B.
    assert [total(straight, straight), total(straight, turned), total(turned, turned)] == [0, 1, 2]


def pat_by_steps(ends_on, count, together):
    """Simulate the phases of NCCL's PAT for one rank; return its sum as text."""
    power = 1 << (count - 1).bit_length()
    apart = power // together
    sums = {at: str((ends_on - at) % count) for at in range(count)}

    def hand(at):
        if 0 < at < count:
            to = at & (at - 1)
            sums[to] = f"({sums[to]}+{sums[at]})"

    for low in range(apart - 1, 1, -1):
        for high in range(together):
            hand(high * apart + low)
    scale = 1
    while scale < together:
        for odd in range(1, together // scale, 2):
            hand(odd * scale * apart + 1)
        for odd in range(1, together // scale, 2):
            hand(odd * scale * apart)
        scale *= 2
    hand(1)
    return sums[0]


@pytest.mark.parametrize("count", range(2, 20))
@pytest.mark.parametrize("part_bytes", [16, 1 << 18, 1 << 24])
def test_pat_adds_as_simulated(count, part_bytes):
    together = pat_together(count, part_bytes=part_bytes)
    for ends_on in range(count):
        tree = pat_tree(ends_on, count, part_bytes=part_bytes)
        assert shown(tree) == pat_by_steps(ends_on, count, together)
        assert sorted(step for step in tree if step != ADD) == list(range(count))


def test_pat_batch_depends_on_size():
    sizes = (1 << 10, 100 << 10, 1 << 24)
    assert [pat_together(64, part_bytes=size) for size in sizes] == [32, 16, 8]


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "reduce"])
@pytest.mark.parametrize("count", [1, 1000, 10**6, 3 * 10**6 + 1])
@pytest.mark.parametrize("channels", [2, 8, 24])
def test_parts_of_channels_tile_the_elements(kind, count, channels):
    arrangement = Arrangement(rings=(tuple(range(8)),) * channels)
    parts = channel_parts(kind, count, elem_bytes=4, rank_count=8, arrangement=arrangement)
    assert parts[0][0] == 0
    assert parts[-1][1] == count
    assert all(one[1] == other[0] for one, other in pairwise(parts))
    assert len(parts) <= channels
    # A small call uses a single channel.
    assert len(parts) > 1 or count <= 1000


def test_each_channel_has_its_own_ring():
    rings = ((0, 1, 2), (0, 2, 1))
    runs = list(
        pieces(
            Arrangement(rings=rings), kind="reduce_scatter", elems=3 << 20, elem_bytes=4, ends_on=1
        )
    )
    assert [shown(tree) for _, _, tree in runs] == ["((2+0)+1)", "((0+2)+1)"]
    assert (runs[0][0], runs[-1][1]) == (1 << 20, 2 << 20)


def test_json_round_trip():
    arrangement = Arrangement(rings=((0, 2, 1),), all_reduce="tree", trees=((0, 1, ADD, 2, ADD),))
    assert Arrangement.from_dict(json.loads(json.dumps(arrangement.as_dict()))) == arrangement
