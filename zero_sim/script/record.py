"""The record of one run of a script: how it ended, rank 0's output, what ranks had at points."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from zero_sim.errors import UsageError
from zero_sim.sim import WorldFailure, unwatched
from zero_sim.sim.callsite import site_of

_DIGEST_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One rank's coming to a named point."""

    name: str
    visit: int
    """How often the rank had come to it before."""
    site: str
    """Where it stands, `file:line`."""
    digests: Mapping[str, bytes]
    """Of everything the rank had there, by its name."""

    @property
    def title(self) -> str:
        """The point in words."""
        return f"{self.name!r}, visit {self.visit}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScriptRun:
    """One run."""

    seed: int
    failure: WorldFailure | None
    """What ended it; None where every rank came to its end."""
    ending: str
    """How it ended, in words without what differs from run to run."""
    output: tuple[str, ...]
    """Lines that rank 0 wrote to its standard output."""
    points: tuple[tuple[Point, ...], ...]
    """By rank, in the order in which it came to them."""
    collective_count: int


@dataclass(slots=True)
class PointRecorder:
    """Takes down the points that one rank comes to."""

    points: list[Point] = field(default_factory=list)
    _visits: dict[str, int] = field(default_factory=dict)

    def note(self, name: str, things: tuple[object, ...], *, file: str, line: int) -> None:
        """Hash what the rank has at a point."""
        visit = self._visits.get(name, 0)
        self._visits[name] = visit + 1
        names = {
            id(param): path
            for thing in things
            if isinstance(thing, torch.nn.Module)
            for path, param in thing.named_parameters()
        }
        digests: dict[str, bytes] = {}
        several = len(things) > 1
        with torch.no_grad(), unwatched():
            for index, thing in enumerate(things):
                for path, value in _values(thing, names, path=""):
                    key = path or f"value {index}"
                    # Two modules may have a param of one name.
                    if several and key in digests:
                        key = f"{key} of argument {index}"
                    digests[key] = _digest(value)
        self.points.append(Point(name=name, visit=visit, site=site_of(file, line), digests=digests))


def _values(thing: object, names: Mapping[int, str], *, path: str) -> Iterator[tuple[str, object]]:
    """Everything in a thing that can differ, with its name."""
    if isinstance(thing, torch.nn.Module):
        for name, param in thing.named_parameters():
            yield name, param
            if param.grad is not None:
                yield f"{name}.grad", param.grad
        yield from thing.named_buffers()
    elif isinstance(thing, torch.optim.Optimizer):
        params = [param for group in thing.param_groups for param in group["params"]]
        for index, param in enumerate(params):
            name = names.get(id(param), f"param {index}")
            yield from _values(thing.state.get(param, {}), names, path=f"optimizer {name}")
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            yield from _values(value, names, path=f"{path}.{key}" if path else str(key))
    elif isinstance(thing, (list, tuple)):
        for index, value in enumerate(thing):
            yield from _values(value, names, path=f"{path}[{index}]")
    else:
        yield path, thing


def _digest(value: object) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    if isinstance(value, torch.Tensor):
        _add_tensor(digest, value)
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        digest.update(repr(value).encode())
    else:
        raise UsageError(
            "expected checkpoint_here to be given modules, optimizers, tensors, numbers, and "
            f"dicts, lists and tuples of them; got {type(value).__qualname__}"
        )
    return digest.digest()


def _add_tensor(digest: hashlib.blake2b, tensor: torch.Tensor) -> None:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach()
    if local.layout is not torch.strided:
        local = local.to_dense()
    digest.update(f"{local.dtype} {tuple(local.shape)} ".encode())
    # FSDP frees the memory of params that it has gathered, and keeps their shapes.
    if local.is_meta or not local.untyped_storage().nbytes():
        return
    local = local.cpu().contiguous().reshape(-1)
    digest.update(local.view(torch.uint8).numpy().tobytes())
