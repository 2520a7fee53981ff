"""Calls that do not fit are refused with both call sites."""

import pytest
import torch
import torch.distributed as dist

from zero_sim.sim import ContractViolation


def refused(world, program):
    with pytest.raises(ContractViolation) as caught:
        world.run(program)
    return str(caught.value)


def both(first, second):
    """A program in which rank 0 does one thing and rank 1 another."""
    return lambda rank: second() if rank else first()


@pytest.mark.parametrize(
    ("aspect", "first", "second"),
    [
        (
            "operation",
            lambda: dist.all_reduce(torch.ones(2)),
            lambda: dist.broadcast(torch.ones(2), src=0),
        ),
        (
            "dtype",
            lambda: dist.all_reduce(torch.ones(2)),
            lambda: dist.all_reduce(torch.ones(2, dtype=torch.bfloat16)),
        ),
        (
            "element count",
            lambda: dist.all_reduce(torch.ones(2)),
            lambda: dist.all_reduce(torch.ones(3)),
        ),
        (
            "reduce operation",
            lambda: dist.all_reduce(torch.ones(2)),
            lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX),
        ),
        (
            "root",
            lambda: dist.broadcast(torch.ones(2), src=0),
            lambda: dist.broadcast(torch.ones(2), src=1),
        ),
    ],
)
def test_mismatch_between_ranks_names_the_aspect_and_both_sites(world_of, aspect, first, second):
    text = refused(world_of(2), both(first, second))
    assert text.startswith(f"{aspect} mismatch in collective #0 of group world")
    assert text.count("test_contract.py:") == 2


def test_sizes_that_cannot_be_scattered(world_of):
    def program(rank):
        dist.reduce_scatter_single(torch.empty(2), torch.ones(5))

    assert "2 x 2 elements" in refused(world_of(2), program)


def test_all_to_all_sizes_that_disagree(world_of):
    def program(rank):
        out = [torch.empty(1), torch.empty(2 if rank == 0 else 1)]
        dist.all_to_all(out, [torch.ones(1), torch.ones(1)])

    text = refused(world_of(2), program)
    assert "rank 1 sends 1 elements to rank 0, which expects 2" in text


def test_a_receive_of_another_size(world_of):
    def program(rank):
        dist.recv(torch.empty(3), src=0) if rank else dist.send(torch.ones(2), dst=1)

    assert "send and receive do not fit" in refused(world_of(2), program)
