"""Simulated GPUs, one per rank, for scripts that require GPUs. Ranks compute on the CPU.

In torch calls, cuda devices are replaced by the CPU, and `torch.cuda` reports GPUs. A device that
is not passed to a call, such as `torch.device("cuda:0")` itself, keeps its name.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from zero_sim.host.device import has_accelerator
from zero_sim.host.dynamo import real_dynamo
from zero_sim.sim.world.rank_threads import rank_state

_CUDA = re.compile(r"cuda(:\d+)?")
_CPU = torch.device("cpu")
# These return a tensor itself if it is on the GPU already. Here every tensor is.
_AS_THEY_ARE = frozenset({torch.Tensor.cuda, torch.Tensor.pin_memory})
# Method that takes a number as a device. By name, because a guest may have replaced torch's
# function.
_TAKES_NUMBER = "to"
# Memory statistics return zero, because there is no device memory.
_MEMORY = (
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "utilization",
)
# Calls without effect, because the CPU has no streams, caches or device generators.
_NOTHING_DONE = (
    "_sleep",
    "empty_cache",
    "init",
    "ipc_collect",
    "manual_seed",
    "manual_seed_all",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_per_process_memory_fraction",
    "set_rng_state",
    "set_rng_state_all",
    "synchronize",
)
# An A100's memory, because scripts choose batch sizes and dtypes by the GPU.
_MEMORY_BYTES = 80 << 30
_NAME = "CPU in the place of a GPU"
# Recent enough for bfloat16 and for other features whose versions scripts check.
_CUDA_VERSION = "12.8"
_NCCL_VERSION = (2, 27, 0)
# Size of a CUDA generator's state: seed and offset, 8 bytes each.
_RNG_STATE_BYTES = 16


class CudaOnCpu:
    """Simulated GPUs of a node. Each rank has a current GPU.

    Args:
        device_count: Number of GPUs per node.
        rank: Returns the rank that runs.
    """

    def __init__(self, *, device_count: int, rank: Callable[[], int]) -> None:
        self._device_count = device_count
        self._rank = rank
        self._current: dict[int, int] = {}

    def in_rank(self) -> AbstractContextManager[object]:
        """Return a context for the calling thread in which cuda devices are the CPU."""
        return _Moved()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Patch torch so that the process finds GPUs. The thread that runs the ranks enters it."""
        self._current.clear()
        # Fill the cache before the patches below make torch report an accelerator.
        has_accelerator()
        # Dynamo maps torch's functions by name when it is imported, and again after a process group
        # was made. A map built under the patches would contain our functions under several names.
        real_dynamo().trace_rules.get_torch_obj_rule_map()
        with contextlib.ExitStack() as stack:
            for place, name, value in self._patches():
                # Some names exist only in CUDA builds, or only in newer versions of torch.
                create = place is torch.cuda or place is torch.accelerator
                stack.enter_context(mock.patch.object(place, name, value, create=create))
            yield

    def _patches(self) -> Iterator[tuple[Any, str, Any]]:
        # Imported here, because this takes half a second and other runs do not need it.
        from torch.distributed.fsdp import FullyShardedDataParallel

        answers = self._answers()
        answers |= dict.fromkeys(_MEMORY, lambda *args, **kwargs: 0)
        answers |= dict.fromkeys(_NOTHING_DONE, lambda *args, **kwargs: None)
        for name, value in answers.items():
            yield torch.cuda, name, value
        # torch.accelerator has the same functions under other names, which differ between versions.
        for name, same in (
            ("is_available", "is_available"),
            ("device_count", "device_count"),
            ("set_device_index", "set_device"),
            ("set_device_idx", "set_device"),
            ("current_device_index", "current_device"),
            ("current_device_idx", "current_device"),
            ("synchronize", "synchronize"),
            ("current_stream", "current_stream"),
        ):
            yield torch.accelerator, name, answers[same]
        yield torch.accelerator, "current_accelerator", lambda check_available=False: _GPU
        yield dist, "is_nccl_available", lambda: True
        yield torch.cuda.nccl, "version", lambda: _NCCL_VERSION
        yield torch.version, "cuda", _CUDA_VERSION
        # Scripts import these functions from either module.
        for place in (dist, distributed_c10d):
            for name in ("init_process_group", "new_group"):
                yield place, name, _without_nccl(getattr(place, name))
        # The C++ binding rejects our Stream before `_Moved` sees the call, hence this patch.
        yield torch.Tensor, "record_stream", lambda tensor, stream: None
        yield torch, "load", _mapping(torch.load, ("map_location",))
        yield torch, "set_default_device", _mapping(torch.set_default_device, ("device",))
        yield torch.nn.Module, "to", _mapping(torch.nn.Module.to, ("device",), numbers=True)
        yield torch.amp.GradScaler, "__init__", _mapping(torch.amp.GradScaler.__init__, ("device",))
        yield torch.autocast, "__init__", _autocast(torch.autocast.__init__)
        yield DeviceMesh, "__init__", _mapping(DeviceMesh.__init__, ("device_type",))
        # DDP refuses these for a model on the CPU, and a loader cannot pin memory there.
        ddp = _without(DistributedDataParallel.__init__, ("device_ids", "output_device"))
        yield DistributedDataParallel, "__init__", ddp
        fsdp = FullyShardedDataParallel
        yield fsdp, "__init__", _mapping(fsdp.__init__, ("device_id",), numbers=True)
        loader = torch.utils.data.DataLoader
        yield loader, "__init__", _without(loader.__init__, ("pin_memory", "pin_memory_device"))

    def _answers(self) -> dict[str, Any]:
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "is_bf16_supported": lambda including_emulation=True: True,
            "is_current_stream_capturing": lambda: False,
            "device_count": lambda: self._device_count,
            "current_device": lambda: self._current.get(self._rank(), 0),
            "set_device": self._set_device,
            "device": lambda device: contextlib.nullcontext(),
            "get_device_name": lambda device=None: _NAME,
            # An A100's, the first GPU with bfloat16.
            "get_device_capability": lambda device=None: (8, 0),
            "get_device_properties": lambda device=None: SimpleNamespace(
                name=_NAME, major=8, minor=0, total_memory=_MEMORY_BYTES, multi_processor_count=1
            ),
            "mem_get_info": lambda device=None: (_MEMORY_BYTES, _MEMORY_BYTES),
            # Scripts look up any name, so return zero for all.
            "memory_stats": lambda device=None: defaultdict(int),
            "get_rng_state": _rng_state,
            "get_rng_state_all": lambda: [_rng_state() for _ in range(self._device_count)],
            "default_generators": tuple([_GENERATOR] * self._device_count),
            "Stream": Stream,
            "Event": Event,
            "stream": lambda stream: stream or contextlib.nullcontext(),
            "current_stream": lambda device=None: _thread.stream,
            "default_stream": lambda device=None: _DEFAULT_STREAM,
            "set_stream": lambda stream: setattr(_thread, "stream", stream),
        }

    def _set_device(self, device: Any, /) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index is None:
            return
        if not 0 <= index < self._device_count:
            raise RuntimeError(
                f"CUDA error: invalid device ordinal: expected below {self._device_count}, the "
                f"number of GPUs per node, got {index}"
            )
        self._current[self._rank()] = index


def _rng_state(device: object = None) -> torch.Tensor:
    """Return a constant state, because the CPU's generator makes all draws."""
    return torch.zeros(_RNG_STATE_BYTES, dtype=torch.uint8)


_GENERATOR = SimpleNamespace(
    get_state=_rng_state,
    initial_seed=lambda: 0,
    manual_seed=lambda seed: _GENERATOR,
    seed=lambda: 0,
    set_state=lambda state: _GENERATOR,
)
_GPU = torch.device("cuda")


class Stream:
    """Stand-in for `torch.cuda.Stream`. Calls complete at once, in their order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._outer: list[Stream] = []

    def __enter__(self) -> Self:
        self._outer.append(_thread.stream)
        _thread.stream = self
        return self

    def __exit__(self, *exception: object) -> None:
        _thread.stream = self._outer.pop()

    def wait_stream(self, stream: object) -> None:
        """Do nothing, because no work is pending."""

    def wait_event(self, event: object) -> None:
        """Do nothing, because a recorded event has occurred."""

    def synchronize(self) -> None:
        """Do nothing, because no work is pending."""

    def query(self) -> bool:
        """Return True, because no work is pending."""
        return True

    def is_capturing(self) -> bool:
        """Return False, because no graph is captured."""
        return False

    def record_event(self, event: Event | None = None) -> Event:
        """Record and return the event, or a new event."""
        event = event or Event()
        event.record()
        return event


class Event:
    """Stand-in for `torch.cuda.Event`, which occurs when it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: object = None) -> None:
        """Record the event: take the time."""
        self._seconds = time.perf_counter()

    def wait(self, stream: object = None) -> None:
        """Do nothing, because the event has occurred."""

    def synchronize(self) -> None:
        """Do nothing, because the event has occurred."""

    def query(self) -> bool:
        """Return True, because the event has occurred."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this event to `end`."""
        return (end._seconds - self._seconds) * 1000


_DEFAULT_STREAM = Stream()


class _Thread(threading.local):
    # True if cuda devices are the CPU in this thread.
    moves = False
    # The current stream.
    stream = _DEFAULT_STREAM


_thread = _Thread()


class _Moved(TorchFunctionMode):
    """Mode that replaces cuda devices by the CPU in torch calls."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._outer, _thread.moves = _thread.moves, True
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        _thread.moves = self._outer
        super().__exit__(exc_type, exc_val, exc_tb)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _AS_THEY_ARE:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Some libraries recognise dtypes on a GPU by names such as `torch.cuda.FloatTensor`.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs:
            kwargs["device"] = _moved(kwargs["device"], numbers=True)
        if len(args) > 1 and func.__name__ == _TAKES_NUMBER:
            args = (args[0], _moved(args[1], numbers=True), *args[2:])
        # In other calls a number is a size or an axis, not a device.
        else:
            args = tuple([_moved(arg) if type(arg) is torch.device else arg for arg in args])
        return func(*args, **kwargs)


def _moved(value: Any, *, numbers: bool = False) -> Any:
    """Return the value with cuda devices replaced by the CPU, also in keys and values of a dict."""
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str):
        return "cpu" if _CUDA.fullmatch(value) else value
    if numbers and isinstance(value, int) and not isinstance(value, bool):
        return _CPU
    if isinstance(value, dict):
        return {_moved(key): _moved(each) for key, each in value.items()}
    return value


def _mapping(
    original: Callable[..., Any], names: tuple[str, ...], *, numbers: bool = False
) -> Callable[..., Any]:
    """Wrap a function so that devices in its arguments, and in keywords `names`, are the CPU."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _thread.moves:
            return original(*args, **kwargs)
        args = tuple([_moved(arg) for arg in args])
        if numbers and len(args) > 1:
            args = (args[0], _moved(args[1], numbers=True), *args[2:])
        for name in names:
            if name in kwargs:
                kwargs[name] = _moved(kwargs[name], numbers=numbers)
        return original(*args, **kwargs)

    return call


def _without_nccl(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a group constructor: outside of ranks, nccl becomes gloo."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _thread.moves and rank_state.join is None:
            args = tuple(["gloo" if each == "nccl" else each for each in args])
            kwargs = {key: "gloo" if each == "nccl" else each for key, each in kwargs.items()}
        return original(*args, **kwargs)

    return call


def _autocast(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def call(
        self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if _thread.moves and device_type == "cuda":
            # A GPU's default dtype is fp16; the CPU's would be bf16.
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        original(self, device_type, dtype, *args, **kwargs)

    return call


def _without(original: Callable[..., None], names: tuple[str, ...]) -> Callable[..., None]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> None:
        if _thread.moves:
            kwargs = {key: value for key, value in kwargs.items() if key not in names}
        original(*args, **kwargs)

    return call
