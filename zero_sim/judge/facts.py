"""Facts about a rank's engine before the first step, which every judge needs from all ranks."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_sim.reference import Addresses, MemoryLayout, memory_layout_of
from zero_sim.targets import EngineAdapter, Place

_DIGEST_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts about one rank's engine before the first step."""

    places: tuple[Place, ...]
    """Owned places of optimizer state."""
    addresses: Addresses
    """Addresses and strides of working params."""
    shapes: Mapping[str, tuple[int, ...]]
    unreported: frozenset[str] = frozenset()
    """Items that the engine does not report."""
    tied_parts: Mapping[str, str] = field(default_factory=dict)
    """First names of tied params that the rank owns under a second name, by second name."""
    can_unwrap: bool = False
    """True if the engine can unwrap its module."""
    start: Mapping[str, str] = field(default_factory=dict)
    """Digests of the module's params and buffers, by name; empty if not requested."""
    drawn: Mapping[str, Tensor] = field(default_factory=dict)
    """Copies of working params that the system drew; empty if it drew none."""

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {
            # Lists in the order of Place's fields, as `from_dict` expects.
            "places": [list(dataclasses.astuple(place)) for place in self.places],
            "addresses": {
                name: [layout.address, list(layout.strides)]
                for name, layout in self.addresses.items()
            },
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "unreported": sorted(self.unreported),
            "tied_parts": dict(self.tied_parts),
            "can_unwrap": self.can_unwrap,
            "start": dict(self.start),
            # Hex, because JSON has no bytes.
            "drawn": {
                name: [str(value.dtype).removeprefix("torch."), _bytes_of(value).hex()]
                for name, value in self.drawn.items()
            },
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Facts:
        """Build facts from a result of `as_dict`."""
        names = [field.name for field in dataclasses.fields(Place)]
        return cls(
            places=tuple(
                Place(**dict(zip(names, values, strict=True))) for values in data["places"]
            ),
            addresses={
                name: MemoryLayout(address, tuple(strides))
                for name, (address, strides) in data["addresses"].items()
            },
            shapes={name: tuple(shape) for name, shape in data["shapes"].items()},
            unreported=frozenset(data["unreported"]),
            tied_parts=data["tied_parts"],
            can_unwrap=data["can_unwrap"],
            start=data["start"],
            drawn={
                # frombuffer raises on empty buffers, and an empty param needs no start value.
                name: torch.frombuffer(bytearray.fromhex(content), dtype=torch.uint8)
                .view(getattr(torch, dtype))
                .reshape(data["shapes"][name])
                for name, (dtype, content) in data["drawn"].items()
                if content
            },
        )


def facts_of(engine: EngineAdapter, *, with_start: bool = False, with_drawn: bool = False) -> Facts:
    """Collect the facts about a rank's engine.

    Args:
        engine: The rank's engine.
        with_start: True to add digests of start values.
        with_drawn: True to add copies of working params, because the system drew them.
    """
    params = engine.params()
    begun = params if with_start or with_drawn else {}
    if with_start:
        # Params override the module's, because an engine may hold other working params.
        begun = {**engine.module_tensors(), **params}
    # The oracle replays all ranks, so it needs each rank's positions in buffers, which the order of
    # a sum depends on, and param addresses, which the bits of a matrix product may depend on.
    return Facts(
        places=tuple(part.place for part in engine.parts()),
        addresses={name: memory_layout_of(param) for name, param in params.items()},
        shapes={name: tuple(param.shape) for name, param in params.items()},
        unreported=engine.unreported,
        tied_parts=dict(engine.tied_parts),
        can_unwrap=engine.can_unwrap,
        start={name: _digest(tensor) for name, tensor in begun.items()},
        # Copies, because this rank may train before the last rank has built its engine.
        drawn={name: each.detach().clone() for name, each in params.items() if with_drawn},
    )


def _digest(tensor: Tensor) -> str:
    return hashlib.blake2b(_bytes_of(tensor), digest_size=_DIGEST_BYTES).hexdigest()


def _bytes_of(tensor: Tensor) -> bytes:
    # Through bytes, because numpy has neither bf16 nor fp8.
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
