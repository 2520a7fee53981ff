"""Memory meter for a rank: the storage of each tensor that its operations return, until freed.

A dispatch mode on the rank's thread records the result of each torch operation, and weak references
record when it is freed. A storage counts under the category that the system reports, else under the
phase that allocated it. Operations inside the simulated world do not count.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero_sim.calculators.ledger import BETWEEN, Sample
from zero_sim.cost.hook_trace import watch_arrival

# Frames between an operation and its caller: torch itself, and the stand-in for its compiler.
_BETWEEN_CALLS = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[1] / "host" / "dynamo.py"),
)
_WORLD = str(Path(__file__).parents[1] / "sim")
_NAMED_BY_BIRTH = {"forward": "activations", "backward": "autograd", "step": "staging"}
_COUNTER_BYTES = 8
"""Maximum bytes of a counter, such as an optimizer's step, which does not grow with the model."""
Named = Callable[[], Iterable[tuple[str, Tensor]]]
"""Returns category and tensor for all memory that has a name now."""


@dataclass(slots=True)
class _Block:
    storage: weakref.ref[UntypedStorage]
    bytes: int
    born: str  # phase that allocated it


@dataclass(slots=True, eq=False, weakref_slot=True)
class MemoryMeter:
    """A rank's memory meter. Enter `watching()` around all work on the rank.

    Args:
        named: Source of names, called at every sample because params and gradients move.
    """

    named: Named = tuple
    phase: str = "build"
    samples: list[Sample] = field(default_factory=list)
    is_sampling: bool = False
    on_sample: Callable[[Sample], None] | None = None
    """Called with each new sample."""
    # By address of the storage's implementation, which views share.
    _live: dict[int, _Block] = field(default_factory=dict)

    def watching(self) -> TorchDispatchMode:
        """Return the dispatch mode that records results."""
        return _Watch(self)

    def note(self, tensor: Tensor) -> None:
        """Record the storage of a tensor that an operation returned."""
        storage = tensor.untyped_storage()
        size, key = storage.nbytes(), storage._cdata
        block = self._live.get(key)
        # The result is a view, or an in-place resize.
        if block is not None:
            block.bytes = size
        elif size:
            forget = partial(self._forget, key)
            self._live[key] = _Block(weakref.ref(storage, forget), size, self.phase)

    def sample(self, where: str) -> None:
        """Add up live bytes by category, if the step is measured."""
        if not self.is_sampling:
            return
        # If a storage has several names, the last name counts.
        names = {_local(tensor).untyped_storage()._cdata: name for name, tensor in self.named()}
        sums: dict[str, int] = {}
        for key, block in self._live.items():
            storage = block.storage()
            # FSDP resizes the storage of gathered params in place, without an operation.
            size = block.bytes if storage is None else storage.nbytes()
            born = "other" if size <= _COUNTER_BYTES else _NAMED_BY_BIRTH.get(block.born, "other")
            name = names.get(key, born)
            if size:
                sums[name] = sums.get(name, 0) + size
        self.samples.append(Sample(phase=self.phase, where=where, bytes=sums))
        if self.on_sample is not None:
            self.on_sample(self.samples[-1])

    def end(self) -> None:
        """Take the last sample, between the measured step and the next."""
        self.phase = BETWEEN
        self.sample("the step is over")
        self.is_sampling = False

    def _arrive(self, name: str) -> None:
        self.sample(f"the gradient of {name} arrived")

    def _forget(self, key: int, storage: weakref.ref[UntypedStorage]) -> None:
        # By now, the address may belong to another block.
        block = self._live.get(key)
        if block is not None and block.storage is storage:
            del self._live[key]


class _Watch(TorchDispatchMode):
    """Dispatch mode that passes each operation's result to a meter."""

    def __init__(self, meter: MemoryMeter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # DTensor then calls the operation again, with this rank's local tensors.
        if DTensor in types:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if _is_of_world():
            return result
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                self._meter.note(tensor)
        return result


def _is_of_world() -> bool:
    """Return True if the simulated world called the operation."""
    # The world copies data in the rank's thread, so only the stack shows the caller. Frame 2 is
    # the caller of __torch_dispatch__.
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN_CALLS):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_WORLD)


def sample_at_modules(meter: MemoryMeter, module: nn.Module) -> None:
    """Take samples when modules with direct params begin and end, and when gradients arrive.

    Args:
        meter: The rank's meter.
        module: The trained module, after the system was built around it.
    """
    # These hooks run after the system's hooks, so samples show memory after the system's work.
    for name, each in module.named_modules():
        if not name or any(True for _ in each.parameters(recurse=False)):
            label = name or "the model"
            each.register_forward_pre_hook(partial(_began, meter, label))
            each.register_forward_hook(partial(_ended, meter, label))
    for name, param in module.named_parameters():
        if param.requires_grad:
            watch_arrival(param, meter._arrive, name=name)


def _began(meter: MemoryMeter, name: str, module: nn.Module, args: object) -> None:
    meter.sample(f"{name} began")


def _ended(meter: MemoryMeter, name: str, module: nn.Module, args: object, out: object) -> None:
    meter.sample(f"{name} ended")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def named_by_torch(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's named memory: trained params, frozen params, gradients.

    Args:
        module: The model.
    """
    for param in module.parameters():
        yield "params" if param.requires_grad else "frozen", param.detach()
        # In forward, FSDP1 replaces params by views of a flat param. Views have no gradient.
        if param.is_leaf and param.grad is not None:
            yield "gradients", param.grad
