"""The probe recovers each order's trees from sums alone, and reports drift."""

from typing import get_args

import pytest
import torch
import torch.distributed as dist

from zero_sim.backends.probe import by_calling, compare, observe, verify
from zero_sim.backends.probe_models import by_model, pieces_of, text_of, tree_of
from zero_sim.reference import Arrangement
from zero_sim.scenario.spec import OrderName

ORDERS = get_args(OrderName)
BF16 = torch.bfloat16


def observed(world_of, order, *, size, kind="all_reduce", elems=None, dtype=BF16):
    elems = 3 * size if elems is None else elems

    def program(rank):
        reduction = by_calling(kind, group=dist.group.WORLD, elems=elems)
        return observe(reduction, rank_count=size, elems=elems, dtype=dtype)

    results = world_of(size, order=order, seed=5).run(program)
    assert all(result == results[0] for result in results)
    return results[0]


def modelled(order, *, size, kind="all_reduce", elems=None, dtype=BF16):
    elems = 3 * size if elems is None else elems
    reduction = by_model(kind, order=order, rank_count=size, elems=elems, order_seed=5)
    return observe(reduction, rank_count=size, elems=elems, dtype=dtype)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("all_reduce", BF16),
        ("all_reduce", torch.float32),
        ("reduce_scatter", torch.float16),
        ("reduce_scatter", torch.float64),
    ],
)
@pytest.mark.parametrize("order", ORDERS)
def test_every_simulated_order_agrees_with_its_model(world_of, order, kind, dtype):
    case = {"size": 5, "kind": kind, "dtype": dtype}
    seen = observed(world_of, order, **case)
    assert compare(modelled(order, **case), seen, name=order) == f"agrees with {order}"
    assert "?" not in seen.trees


@pytest.mark.parametrize(
    ("order", "size", "tree"),
    [
        ("linear", 1, "0"),
        ("linear", 2, "(0+1)"),
        ("linear", 4, "(((0+1)+2)+3)"),
        ("linear-fp32", 4, "(((0+1)+2)+3)"),
        ("tree", 4, "((0+1)+(2+3))"),
        ("tree", 5, "(((0+1)+(2+3))+4)"),
    ],
)
def test_uniform_orders_have_one_tree(world_of, order, size, tree):
    assert observed(world_of, order, size=size).trees == (tree,)


def test_ring_has_one_tree_per_chunk(world_of):
    seen = observed(world_of, "ring", size=3, elems=7)
    # Chunk 0 is x0, x1, x2; chunk 1 is x1, x2, x0; chunk 2 is x2, x0, x1.
    assert seen.trees == ("((0+1)+2)", "(0+(1+2))", "((0+2)+1)")
    assert seen.starts == (0, 3, 6)


@pytest.mark.parametrize(
    ("order", "accumulator"),
    [("linear", "data"), ("linear-fp32", "wider"), ("nccl-sym", "wider"), ("random-tree", "mixed")],
)
def test_accumulator_is_measured(world_of, order, accumulator):
    assert observed(world_of, order, size=5).accumulator == accumulator


def test_drift_names_both_trees(world_of):
    seen = observed(world_of, "nccl-ring", size=4, kind="reduce_scatter")
    message = compare(modelled("tree", size=4, kind="reduce_scatter"), seen, name="tree")
    assert message == (
        "drift: expected ((0+1)+(2+3)) as in tree, observed tree (0+((1+2)+3)), at element 0"
    )


def test_drift_of_the_accumulator_is_reported(world_of):
    seen = observed(world_of, "linear-fp32", size=3)
    message = compare(modelled("linear", size=3), seen, name="linear")
    assert message == (
        "drift: expected partial sums as in linear, in the data's dtype, "
        "observed them in a wider dtype"
    )


@pytest.mark.parametrize("order", ["linear", "tree", "ring", "nccl-ring"])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_gloo_is_distinguished_from_other_orders(world_of, order, kind):
    case = {"size": 4, "kind": kind, "elems": 40}
    seen = observed(world_of, "gloo", **case)
    assert compare(modelled(order, **case), seen, name=order).startswith("drift: ")


def test_sums_that_fit_no_tree_have_no_tree():
    """The reduction omits a rank."""

    def reduce(values):
        return values(0) + values(1)

    assert observe(reduce, rank_count=4, elems=1, dtype=torch.float32).trees == ("?",)


def counted(reduce):
    calls = []

    def count(values):
        calls.append(1)
        return reduce(values)

    return count, calls


@pytest.mark.parametrize(("dtype", "room"), [(torch.float32, 22), (BF16, 7)])
def test_number_of_calls_is_linear_in_ranks(dtype, room):
    """A ring of ranks in any order needs at most five pairs per rank."""
    size = 24
    ring = tuple(torch.randperm(size, generator=torch.Generator().manual_seed(3)).tolist())
    ring = (*ring[ring.index(0) :], *ring[: ring.index(0)])
    arrangement = Arrangement(rings=(ring,))
    reduce, calls = counted(
        by_model(
            "reduce_scatter",
            order="nccl-ring",
            rank_count=size,
            elems=size,
            arrangement=arrangement,
        )
    )
    seen = observe(reduce, rank_count=size, elems=size, dtype=dtype)
    assert "?" not in seen.trees
    assert len(calls) <= 5 * size * -(-(size - 2) // room)


def test_model_is_verified_in_one_call():
    size, elems = 24, 24 * 40
    pieces = pieces_of("all_reduce", order="nccl-ring", rank_count=size, elems=elems, elem_bytes=4)
    model = by_model("all_reduce", order="nccl-ring", rank_count=size, elems=elems)
    reduce, calls = counted(model)
    how = {"rank_count": size, "elems": elems, "dtype": torch.float32}
    assert verify(reduce, pieces, **how) is None
    assert len(calls) == 1
    other = pieces_of("all_reduce", order="gloo", rank_count=size, elems=elems, elem_bytes=4)
    assert verify(reduce, other, **how) == 0


@pytest.mark.parametrize("order", ["linear", "tree", "ring", "gloo", "nccl-ring"])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "reduce_scatter_list"])
def test_pieces_match_the_model(order, kind):
    size, elems = 5, 40
    sizes = (3, 0, 20, 9, 8)
    how = {"rank_count": size, "elems": elems, "sizes": sizes}
    pieces = pieces_of(kind, order=order, elem_bytes=4, **how)
    model = by_model(kind, order=order, **how)
    assert verify(model, pieces, rank_count=size, elems=elems, dtype=torch.float32) is None
    assert [pieces[0][0], pieces[-1][1]] == [0, elems]


def test_single_deviating_element_is_found_after_the_first_loop():
    """Slightly more than 2 MiB per rank, so that the last loop has its own chunks."""
    size, elems = 3, 3 * (1 << 19) + 50
    how = {"rank_count": size, "elems": elems}
    right = pieces_of("all_reduce", order="nccl-ring", elem_bytes=4, **how)
    model = by_model("all_reduce", order="nccl-ring", **how)
    assert verify(model, right, dtype=torch.float32, **how) is None
    # As if chunks had no upper limit: only the first loop is equal.
    wrong = pieces_of("all_reduce", order="ring", elem_bytes=4, **how)
    assert verify(model, wrong, dtype=torch.float32, **how) is not None


@pytest.mark.parametrize("text", ["0", "(0+1)", "((0+12)+(1+2))"])
def test_tree_text_round_trips(text):
    assert text_of(tree_of(text)) == text
