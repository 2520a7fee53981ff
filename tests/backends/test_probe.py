"""The probe recovers every order's trees from sums alone, and tells a drift."""

from typing import get_args

import pytest
import torch
import torch.distributed as dist

from zero_sim.backends.probe import by_calling, by_model, compare, observe
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


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
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
def test_trees_of_orders_that_are_the_same_everywhere(world_of, order, size, tree):
    assert observed(world_of, order, size=size).trees == (tree,)


def test_the_chunks_of_a_ring(world_of):
    seen = observed(world_of, "ring", size=3, elems=7)
    # Chunk 0 is x0, x1, x2; chunk 1 is x1, x2, x0; chunk 2 is x2, x0, x1.
    assert seen.trees == ("((0+1)+2)", "(0+(1+2))", "((0+2)+1)")
    assert seen.starts == (0, 3, 6)


@pytest.mark.parametrize(
    ("order", "accumulator"),
    [("linear", "data"), ("linear-fp32", "wider"), ("nccl-sym", "wider"), ("random-tree", "mixed")],
)
def test_the_accumulator_is_measured(world_of, order, accumulator):
    assert observed(world_of, order, size=5).accumulator == accumulator


def test_a_drift_names_both_trees(world_of):
    seen = observed(world_of, "nccl-ring", size=4, kind="reduce_scatter")
    message = compare(modelled("tree", size=4, kind="reduce_scatter"), seen, name="tree")
    assert message == (
        "drift: expected ((0+1)+(2+3)) as in tree, observed tree (0+((1+2)+3)), at element 0"
    )


def test_a_drift_of_the_accumulator(world_of):
    seen = observed(world_of, "linear-fp32", size=3)
    message = compare(modelled("linear", size=3), seen, name="linear")
    assert message == (
        "drift: expected partial sums as in linear, in the data's dtype, "
        "observed them in a wider dtype"
    )


@pytest.mark.parametrize("order", ["linear", "tree", "ring", "nccl-ring"])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_gloo_is_told_from_all_others(world_of, order, kind):
    case = {"size": 4, "kind": kind, "elems": 40}
    seen = observed(world_of, "gloo", **case)
    assert compare(modelled(order, **case), seen, name=order).startswith("drift: ")


def test_sums_that_fit_no_tree_are_said_to_fit_none():
    """A reduction that forgets a rank."""

    def reduce(values):
        return values(0) + values(1)

    assert observe(reduce, rank_count=4, elems=1, dtype=torch.float32).trees == ("?",)
