"""Strip of a finding: the map of a buffer, joined from the places of its owners."""

from dataclasses import replace

import pytest
import torch

from zero_sim.findings.buffer_map import PIECES_MAX, build_buffer_map, map_buffer
from zero_sim.findings.records import Finding, MappedBucket, MappedPiece, MappedShard
from zero_sim.scenario.spec import ModelSpec, RunSpec, SystemSpec, WorldSpec
from zero_sim.targets import Place
from zero_sim.zero.optimizer import DistributedOptimizer


def place(param, start, stop, flat, *, shard, span, bucket=(0, 0, 16), padding=14, buffer=0):
    index, bucket_start, bucket_stop = bucket
    return Place(
        param=param,
        start=start,
        stop=stop,
        flat_start=flat,
        bucket=index,
        shard=shard,
        shard_start=span[0],
        shard_stop=span[1],
        reduced_by="reduce_scatter",
        call_elems=16,
        call_offset=0,
        buffer=buffer,
        bucket_start=bucket_start,
        bucket_stop=bucket_stop,
        padding_start=padding,
    )


PLACES = {
    0: [place("w", 0, 8, 0, shard=0, span=(0, 8))],
    1: [place("w", 8, 10, 8, shard=1, span=(8, 16)), place("b", 0, 4, 10, shard=1, span=(8, 16))],
}


def found(param="w", *spans, rank=0):
    return Finding(check="c.d", message="", rank=rank, param=param, differ_spans=spans)


def strip_of(*findings, places=PLACES):
    return build_buffer_map(findings[0], found=findings, places=places)


def test_map_without_a_finding_has_the_same_parts():
    strip = strip_of(found("w", (6, 8)))
    assert map_buffer(PLACES) == replace(strip, check="", differ=(), differ_ranks=())


def test_strip_has_buckets_shards_pieces_and_padding():
    strip = strip_of(found("w", (6, 8)))
    assert (strip.elems, strip.start, strip.stop) == (16, 0, 16)
    assert strip.buckets == (MappedBucket(index=0, start=0, stop=16),)
    assert strip.shards == (
        MappedShard(index=0, bucket=0, ranks=(0,), start=0, stop=8),
        MappedShard(index=1, bucket=0, ranks=(1,), start=8, stop=16),
    )
    assert strip.pieces[1:] == (
        MappedPiece(param="w", start=8, stop=10, param_start=8),
        MappedPiece(param="b", start=10, stop=14, param_start=0),
    )
    assert (strip.padding, strip.unowned) == (((14, 16),), ())


def test_differing_spans_are_counted_in_the_buffer():
    strip = strip_of(found("w", (7, 9), rank=0), found("b", (0, 1), (3, 4), rank=1))
    assert strip.differ == ((7, 9), (10, 11), (13, 14))
    assert strip.differ_ranks == (0, 1)


def test_replicas_share_a_shard():
    places = {**PLACES, 2: PLACES[0], 3: PLACES[1]}
    strip = strip_of(found("w", (0, 1)), places=places)
    assert [shard.ranks for shard in strip.shards] == [(0, 2), (1, 3)]


def test_other_buffers_are_omitted():
    other = place("e", 0, 4, 0, shard=0, span=(0, 8), buffer=1)
    strip = strip_of(found("w", (0, 1)), places={0: [*PLACES[0], other], 1: PLACES[1]})
    assert {piece.param for piece in strip.pieces} == {"w", "b"}


def test_offsets_per_bucket_map_the_bucket_of_the_finding():
    later = place("e", 0, 4, 0, shard=0, span=(0, 4), bucket=(1, 0, 8), padding=8)
    last = place("f", 0, 4, 4, shard=1, span=(4, 8), bucket=(1, 0, 8), padding=8)
    places = {0: [*PLACES[0], later], 1: [*PLACES[1], last]}
    strip = strip_of(found("f", (1, 2)), found("w", (0, 1)), places=places)
    assert [piece.param for piece in strip.pieces] == ["e", "f"]
    assert strip.buckets == (MappedBucket(index=1, start=0, stop=8),)
    assert strip.differ == ((5, 6),)


def test_param_in_two_buffers_maps_the_part_that_differs():
    other = place("w", 10, 14, 0, shard=0, span=(0, 4), bucket=(1, 0, 4), padding=4, buffer=1)
    places = {0: [*PLACES[0], other], 1: PLACES[1]}
    at = replace(found("w", (11, 12), rank=0), offset_in_param=11)
    strip = strip_of(at, found("w", (1, 2), rank=1), places=places)
    assert (strip.buffer, strip.differ, strip.differ_ranks) == (1, ((1, 2),), (0,))


def test_ranks_with_different_buffers_map_the_one_of_the_finding():
    other = replace(PLACES[0][0], buffer=1)
    strip = strip_of(found("w", (1, 2)), places={0: PLACES[0], 1: [other]})
    assert (strip.buffer, strip.differ) == (0, ((1, 2),))


def test_gap_is_unowned():
    places = {0: [place("w", 0, 7, 0, shard=0, span=(0, 8))], 1: PLACES[1]}
    strip = strip_of(found("w", (7, 8)), places=places)
    assert (strip.unowned, strip.differ, strip.padding) == (((7, 8),), ((7, 8),), ((14, 16),))


def test_unreported_padding_is_the_part_without_pieces():
    unreported = [
        place("w", 0, 4, 0, shard=0, span=(0, 8), bucket=(0, None, None), padding=None),
        place("b", 0, 2, 6, shard=0, span=(0, 8), bucket=(0, None, None), padding=None),
    ]
    strip = strip_of(found("w", (0, 1)), places={0: unreported})
    assert (strip.padding, strip.unowned, strip.elems) == (((4, 6),), (), 8)


def test_finding_without_places_has_no_strip():
    assert strip_of(found("w")) is None
    assert strip_of(found("unknown", (0, 1))) is None


@pytest.mark.parametrize("at", [0, 5_000, 9_999])
def test_large_buffer_is_cut_around_the_first_difference(at):
    places = [
        place(str(i), 0, 1, i, shard=0, span=(0, 10_000), bucket=(0, 0, 10_000), padding=10_000)
        for i in range(10_000)
    ]
    strip = strip_of(found(str(at), (0, 1)), places={0: places})
    assert len(strip.pieces) == PIECES_MAX
    assert strip.stop - strip.start == PIECES_MAX
    assert strip.differ == ((at, at + 1),)
    assert strip.start <= at < strip.stop
    assert strip.elems == 10_000


@pytest.fixture
def one_element_off(monkeypatch):
    """Add 1 to the last element of rank 1's first gradient shard, before the step."""
    right = DistributedOptimizer.step

    def changed(self):
        if torch.distributed.get_rank() == 1:
            unit = self.ddp.buffers[0].units[0]
            stop = unit.plan.shard_span(1).stop
            unit.grads[stop - 1].add_(1)
        return right(self)

    monkeypatch.setattr(DistributedOptimizer, "step", changed)


@pytest.mark.usefixtures("one_element_off")
class TestCases:
    def test_differing_element_is_marked_at_its_offset(self, judged):
        result = judged(
            model=ModelSpec(name="mlp", hidden=2),
            world=WorldSpec(size=3),
            system=SystemSpec(bucket_elems=40),
        )
        first, strip = result.findings[0], result.strip
        assert (
            (strip.check, strip.differ_ranks)
            == (first.check, (first.rank,))
            == ("equality.grad", (1,))
        )
        assert strip.differ == ((first.flat_offset, first.flat_offset + 1),)
        shard = next(s for s in strip.shards if s.start <= first.flat_offset < s.stop)
        assert (shard.ranks, shard.stop) == ((1,), first.flat_offset + 1)
        assert len(strip.buckets) > 1
        assert result.as_dict()["strip"]["differ"] == strip.differ

    def test_finding_has_the_calls_of_its_step(self, judged):
        result = judged(run=RunSpec(steps=2), system=SystemSpec(bucket_elems=40))
        first, (log,) = result.findings[0], result.logs
        calls = log.collectives[first.call_start : first.call_stop]
        own = [record.kind for record in calls if record.rank == first.rank]
        assert "reduce_scatter" in own
        assert "broadcast" not in own


def test_passing_case_has_no_strip(judged):
    assert judged().strip is None
