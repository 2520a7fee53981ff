"""What backwards leave behind in a rank's thread."""

from __future__ import annotations

import weakref

import pytest
import torch

from zero_sim.sim import RankFailed, World


class Packed:
    """What a hook keeps of a saved tensor; a weak reference tells whether it lives."""

    def __init__(self, tensor):
        self.tensor = tensor


def fail_in_backward(kept):
    """Raise in a hook while other nodes, which keep what is saved, are ready."""

    def pack(tensor):
        packed = Packed(tensor.clone())
        kept.append(weakref.ref(packed))
        return packed

    def fail(grad):
        raise ZeroDivisionError

    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
        others = [(x * 2).exp() for _ in range(4)]
        last = (x * 3).sin()
    last.register_hook(fail)
    torch.stack([*others, last]).sum().backward()


def test_a_rank_that_raised_keeps_nothing_of_its_backward():
    """Its thread lives on, and would destroy it after the interpreter has begun to end."""
    kept = []

    def program(rank):
        with pytest.raises(ZeroDivisionError):
            fail_in_backward(kept)
        # Of this one no traceback holds what the backward came from.
        raise ValueError

    with World(2) as world:
        with pytest.raises(RankFailed):
            world.run(program)
        assert len(kept) >= 4
        assert [each() for each in kept] == [None] * len(kept)


def test_a_program_that_goes_on_is_let_go_of_when_the_world_closes():
    """It catches what its backward raised."""
    kept = []

    def program(rank):
        with pytest.raises(ZeroDivisionError):
            fail_in_backward(kept)

    with World(1) as world:
        world.run(program)
    assert [each() for each in kept] == [None] * len(kept)
