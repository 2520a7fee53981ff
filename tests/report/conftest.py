"""Hand-made strips for tests of drawings."""

import itertools

import pytest

from zero_sim.findings.records import BufferMap, MappedBucket, MappedPiece, MappedShard


def make_strip(*, shards=4, shard_elems=6, padding=2, names=("w", "b"), differ=((5, 7),), start=0):
    """Return a strip of one bucket, evenly sharded; params share the payload evenly."""
    elems = shards * shard_elems
    payload = elems - padding
    bounds = [i * payload // len(names) for i in range(len(names) + 1)]
    pieces = []
    for name, low, high in zip(names, bounds, bounds[1:], strict=False):
        cuts = [low, *(c for c in range(0, elems, shard_elems) if low < c < high), high]
        pieces += [
            MappedPiece(param=name, start=a, stop=b, param_start=a - low)
            for a, b in itertools.pairwise(cuts)
        ]
    return BufferMap(
        check="equality.grad",
        buffer=0,
        elems=elems,
        start=start,
        stop=elems,
        buckets=(MappedBucket(index=0, start=0, stop=elems),),
        shards=tuple(
            MappedShard(
                index=i, bucket=0, ranks=(i,), start=i * shard_elems, stop=(i + 1) * shard_elems
            )
            for i in range(shards)
        ),
        pieces=tuple(pieces),
        padding=((payload, elems),) if padding else (),
        unowned=(),
        differ=tuple(differ),
        differ_cut=False,
        differ_ranks=(1,),
    )


@pytest.fixture(scope="session")
def even_strip():
    """Maker of a strip of one bucket, evenly sharded. Keyword arguments as of make_strip."""
    return make_strip
