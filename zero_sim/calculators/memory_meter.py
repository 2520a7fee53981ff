"""Meter of a rank's memory: every tensor that its operations make, from birth to death.

It looks at what each operation of torch returns, on the rank's own thread, and hears of it when
memory is freed. A category is a name that the system gives to memory; what has none is called by
the phase in which it was born. What the simulated world does to carry data is no operation of the
rank, and is not seen.
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
from zero_sim.cost.hook_trace import tell_arrival

_BETWEEN_CALLS = (
    str(Path(torch.__file__).parent),
    # Stands between torch and who calls it; see there.
    str(Path(__file__).parents[1] / "host" / "dynamo.py"),
)
_WORLD = str(Path(__file__).parents[1] / "sim")
_NAMED_BY_BIRTH = {"forward": "activations", "backward": "autograd", "step": "staging"}
_COUNTER_BYTES = 8
"""Of one number, such as the step that an optimizer counts: they do not grow with the model."""
Named = Callable[[], Iterable[tuple[str, Tensor]]]
"""Tells all memory that has a name now."""


@dataclass(slots=True)
class _Block:
    """Memory that lives."""

    storage: weakref.ref[UntypedStorage]
    bytes: int
    born: str


@dataclass(slots=True, eq=False, weakref_slot=True)
class MemoryMeter:
    """Notes what lives on one rank; take `watching` around all that the rank does.

    Args:
        named: Tells what has a name; asked at every sample.
    """

    named: Named = tuple
    phase: str = "build"
    samples: list[Sample] = field(default_factory=list)
    is_sampling: bool = False
    on_sample: Callable[[Sample], None] | None = None
    """Called with each sample as it is taken."""
    _live: dict[int, _Block] = field(default_factory=dict)

    def watching(self) -> TorchDispatchMode:
        """The mode in which operations are looked at."""
        return _Watch(self)

    def note(self, tensor: Tensor) -> None:
        """Note memory that an operation returned, unless it is known."""
        storage = tensor.untyped_storage()
        size, key = storage.nbytes(), storage._cdata
        block = self._live.get(key)
        if block is not None:
            block.bytes = size
        elif size:
            forget = partial(self._forget, key)
            self._live[key] = _Block(weakref.ref(storage, forget), size, self.phase)

    def sample(self, where: str) -> None:
        """Add up what lives now, where a step is looked at."""
        if not self.is_sampling:
            return
        names = {_local(tensor).untyped_storage()._cdata: name for name, tensor in self.named()}
        sums: dict[str, int] = {}
        for key, block in self._live.items():
            storage = block.storage()
            # Memory can be resized in place, as FSDP does with what it has gathered.
            size = block.bytes if storage is None else storage.nbytes()
            born = "other" if size <= _COUNTER_BYTES else _NAMED_BY_BIRTH.get(block.born, "other")
            name = names.get(key, born)
            if size:
                sums[name] = sums.get(name, 0) + size
        self.samples.append(Sample(phase=self.phase, where=where, bytes=sums))
        if self.on_sample is not None:
            self.on_sample(self.samples[-1])

    def end(self) -> None:
        """Take the sample between this step and the next, the last one."""
        self.phase = BETWEEN
        self.sample("the step is over")
        self.is_sampling = False

    def _arrive(self, name: str) -> None:
        self.sample(f"the gradient of {name} arrived")

    def _forget(self, key: int, storage: weakref.ref[UntypedStorage]) -> None:
        block = self._live.get(key)
        if block is not None and block.storage is storage:
            del self._live[key]


class _Watch(TorchDispatchMode):
    """Looks at what each operation returns."""

    def __init__(self, meter: MemoryMeter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # It comes again with the tensors that this rank has of them.
        result = func(*args, **(kwargs or {}))
        if _is_of_world():
            return result
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                self._meter.note(tensor)
        return result


def _is_of_world() -> bool:
    """Whether the simulated world called an operation: it carries data in the rank's thread."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN_CALLS):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_WORLD)


def sample_at_modules(meter: MemoryMeter, module: nn.Module) -> None:
    """Take samples when modules with params of their own begin and end, and gradients arrive.

    Args:
        meter: Of the rank.
        module: What the system was given to train, after it was built.
    """
    for name, each in module.named_modules():
        if not name or any(True for _ in each.parameters(recurse=False)):
            label = name or "the model"
            each.register_forward_pre_hook(partial(_began, meter, label))
            each.register_forward_hook(partial(_ended, meter, label))
    for name, param in module.named_parameters():
        if param.requires_grad:
            tell_arrival(param, meter._arrive, name=name)


def _began(meter: MemoryMeter, name: str, module: nn.Module, args: object) -> None:
    meter.sample(f"{name} began")


def _ended(meter: MemoryMeter, name: str, module: nn.Module, args: object, out: object) -> None:
    meter.sample(f"{name} ended")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def named_by_torch(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What torch itself tells of a model: trained params, frozen ones, gradients.

    Args:
        module: The model.
    """
    for param in module.parameters():
        yield "params" if param.requires_grad else "frozen", param.detach()
        # In forward FSDP1 has views of a flat param in the place of params.
        if param.is_leaf and param.grad is not None:
            yield "gradients", param.grad
