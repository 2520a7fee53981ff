"""Memory that a backward leaves in a rank's thread."""

from __future__ import annotations

import weakref

import pytest
import torch

from zero_sim.sim import RankFailed, World


class Packed:
    """Saved tensor as packed by a hook; a weak reference shows if it is alive."""

    def __init__(self, tensor):
        self.tensor = tensor


def fail_in_backward(kept):
    """Raise in a hook while other ready nodes still own saved tensors."""

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


def test_failed_rank_releases_its_backward():
    """The thread would destroy saved tensors after the interpreter has begun to exit."""
    kept = []

    def program(rank):
        with pytest.raises(ZeroDivisionError):
            fail_in_backward(kept)
        # No traceback of this exception refers to the backward.
        raise ValueError

    with World(2) as world:
        with pytest.raises(RankFailed):
            world.run(program)
        assert len(kept) >= 4
        assert [each() for each in kept] == [None] * len(kept)


def test_closing_the_world_releases_a_caught_backward():
    kept = []

    def program(rank):
        with pytest.raises(ZeroDivisionError):
            fail_in_backward(kept)

    with World(1) as world:
        world.run(program)
    assert [each() for each in kept] == [None] * len(kept)
