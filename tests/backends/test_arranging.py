"""Arrangements (rings, trees, channels) are recovered from observed sums alone."""

import pytest
import torch

from zero_sim.backends.arranging import fit, in_words, with_channels
from zero_sim.backends.probe import observe, verify
from zero_sim.backends.probe_models import by_model, pieces_of
from zero_sim.reference import Arrangement
from zero_sim.reference.arrangement import ADD, in_order

SIZE = 6
ELEMS = 5 * SIZE
TURNED = Arrangement(rings=((0, 3, 5, 1, 4, 2),))
TREE = (1, 0, ADD, 5, 4, ADD, 3, 2, ADD, ADD, ADD)
"""Tree of three machines with two ranks each: the second and third chain hang below the first."""


def observed(arrangement, kind, *, order="nccl-ring"):
    size = len(arrangement.rings[0])
    model = by_model(kind, order=order, rank_count=size, elems=5 * size, arrangement=arrangement)
    return observe(model, rank_count=size, elems=5 * size, dtype=torch.float32)


def fitted(arrangement):
    size = len(arrangement.rings[0])
    scattered, reduced = (observed(arrangement, kind) for kind in ("reduce_scatter", "all_reduce"))
    return fit(scattered, reduced, rank_count=size, elems=5 * size, elem_bytes=4)


@pytest.mark.parametrize(
    "ring", [(0, 1, 2), (0, 2, 1), (0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 5, 1, 4, 2)]
)
def test_any_ring_is_recovered(ring):
    assert fitted(Arrangement(rings=(ring,))) == Arrangement(rings=(ring,))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reduce_scatter": "pat"}, "ring 0 3 5 1 4 2, PAT in reduce-scatters"),
        ({"all_reduce": "tree", "trees": (TREE,)}, "ring 0 3 5 1 4 2, tree "),
    ],
)
def test_other_algorithms_are_recovered(changes, said):
    wanted = Arrangement(rings=TURNED.rings, **changes)
    found = fitted(wanted)
    assert found is not None
    assert in_words(found).startswith(said)
    for kind in ("all_reduce", "reduce_scatter"):
        assert observed(found, kind) == observed(wanted, kind)


def test_sums_that_fit_no_model_give_none():
    scattered = observed(TURNED, "reduce_scatter")
    other = observed(in_order(SIZE), "all_reduce", order="gloo")
    assert fit(scattered, other, rank_count=SIZE, elems=ELEMS, elem_bytes=4) is None


def test_wider_accumulator_fits_no_model():
    model = by_model("all_reduce", order="linear-fp32", rank_count=SIZE, elems=ELEMS)
    wide = observe(model, rank_count=SIZE, elems=ELEMS, dtype=torch.bfloat16)
    assert wide.accumulator == "wider"
    assert fit(wide, wide, rank_count=SIZE, elems=ELEMS, elem_bytes=2) is None


def test_channel_count_is_recovered_from_a_large_call():
    size, elems = 4, 4 << 18
    true = Arrangement(rings=((0, 2, 1, 3),) * 3)
    model = by_model(
        "all_reduce", order="nccl-ring", rank_count=size, elems=elems, arrangement=true
    )

    def is_wrong(arrangement):
        pieces = pieces_of(
            "all_reduce",
            order="nccl-ring",
            rank_count=size,
            elems=elems,
            elem_bytes=4,
            arrangement=arrangement,
        )
        how = {"rank_count": size, "elems": elems, "dtype": torch.float32}
        return verify(model, pieces, **how) is not None

    one = Arrangement(rings=true.rings[:1])
    assert is_wrong(one)
    found = next(each for each in with_channels(one) if not is_wrong(each))
    assert len(found.rings) == 3
    assert in_words(found) == "ring 0 2 1 3, on 3 channels"


def test_tree_is_described_in_words():
    arrangement = Arrangement(
        rings=((0, 1, 2),), all_reduce="tree", reduce_scatter="pat", trees=((2, 1, ADD, 0, ADD),)
    )
    assert in_words(arrangement) == "tree (0+(1+2)) in all-reduces, PAT in reduce-scatters"
