"""Facts of a rank's engine, reported before the first step: all that others need to judge.

The order of a sum depends on where an element stands, and the bits of a product on where a param
lies; so the oracle that replays all ranks has to hear it of all of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_sim.reference import Addresses, MemoryLayout, memory_layout_of
from zero_sim.targets import CompletedEngine, Place

_DIGEST_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """One rank's engine before the first step."""

    places: tuple[Place, ...]
    """What it owns of the optimizer."""
    addresses: Addresses
    """Where its working params lie."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of these params."""
    unreported: frozenset[str] = frozenset()
    """What it does not tell, in words."""
    tied_parts: Mapping[str, str] = field(default_factory=dict)
    """First name of each tied param that it owns under another name, by that name."""
    can_unwrap: bool = False
    """True if it can give its module back."""
    start: Mapping[str, str] = field(default_factory=dict)
    """By name: a digest of each param and buffer of its module; empty where nobody asked."""
    drawn: Mapping[str, Tensor] = field(default_factory=dict)
    """Copies of its working params if the system drew them; empty if it did not."""

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
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
            "drawn": {
                name: [str(value.dtype).removeprefix("torch."), _bytes_of(value).hex()]
                for name, value in self.drawn.items()
            },
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Facts:
        """What `as_dict` gave."""
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
                name: torch.frombuffer(bytearray.fromhex(content), dtype=torch.uint8)
                .view(getattr(torch, dtype))
                .reshape(data["shapes"][name])
                for name, (dtype, content) in data["drawn"].items()
                if content
            },
        )


def facts_of(
    engine: CompletedEngine, *, with_start: bool = False, with_drawn: bool = False
) -> Facts:
    """Ask a rank's engine.

    Args:
        engine: The rank's engine, completed.
        with_start: Whether to look at what it begins with, too.
        with_drawn: True if the system drew its working params, which the reference takes.
    """
    params = engine.params()
    begun = params if with_start or with_drawn else {}
    if with_start:
        begun = {**engine.module_tensors(), **params}
    return Facts(
        places=tuple(part.place for part in engine.parts()),
        addresses={name: memory_layout_of(param) for name, param in params.items()},
        shapes={name: tuple(param.shape) for name, param in params.items()},
        unreported=engine.unreported,
        tied_parts=dict(engine.tied_parts),
        can_unwrap=engine.can_unwrap,
        start={name: _digest(tensor) for name, tensor in begun.items()},
        # Copies, because a rank may train before the last one has built its engine.
        drawn={name: each.detach().clone() for name, each in params.items() if with_drawn},
    )


def _digest(tensor: Tensor) -> str:
    return hashlib.blake2b(_bytes_of(tensor), digest_size=_DIGEST_BYTES).hexdigest()


def _bytes_of(tensor: Tensor) -> bytes:
    # As bytes, since numpy knows neither bf16 nor fp8.
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
