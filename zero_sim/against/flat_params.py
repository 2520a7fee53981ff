"""Shard places in `FullyShardedDataParallel`, and shards behind `fully_shard`'s params.

A flat param concatenates a module's params in order, with padding at the end, and is cut into
pieces of equal size. A rank's piece contains a part of each param, which may be empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import Module

from zero_sim.against.points import Piece


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FlatPlace:
    """Place of a rank's part of a param."""

    flat: Any
    """FSDP's FlatParameter."""
    shape: tuple[int, ...]
    """Shape of the unsharded param."""
    index: int
    """This rank's position in the shard group."""
    count: int

    def placed(self, piece: Piece) -> Piece:
        """Add the place to a piece that belongs to the param, its gradient or its state."""
        # The flat param and its views are unsharded while a forward or backward runs.
        is_sharded = self.flat.numel() == self.flat._sharded_size.numel()
        if piece.values.dim() != 1 or not is_sharded:
            return piece
        shards = ((0, self.index, self.count),)
        return replace(piece, shape=self.shape, shards=shards, is_flat=True)


def flat_places(module: Module) -> Iterator[tuple[Tensor, FlatPlace]]:
    """Yield flat params in a module, and the params in them, with places."""
    for each in module.modules():
        handle: Any = getattr(each, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        if flat is None or not getattr(handle, "uses_sharded_strategy", False):
            continue
        # The flat param itself, then the params in it.
        shapes = [flat._unpadded_unsharded_size, *flat._shapes]
        # `_params` is None unless use_orig_params is set.
        for param, shape in zip([flat, *(flat._params or ())], shapes, strict=False):
            place = FlatPlace(
                flat=flat, shape=tuple(shape), index=handle.rank, count=handle.world_size
            )
            yield param, place


def shards_of_whole(module: Module) -> Iterator[tuple[Module, str, Tensor]]:
    """Yield `fully_shard`'s shards, each with its param's module and name."""
    for each in module.modules():
        state: Any = getattr(each, "_get_fsdp_state", lambda: None)()
        for group in () if state is None else _groups(state):
            for param in group.fsdp_params:
                place = param._module_info
                yield place.module, place.param_name, param.sharded_param


def _groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # Since torch 2.13.
    one = several if several is not None else [state._fsdp_param_group]
    return [group for group in one if group is not None]
