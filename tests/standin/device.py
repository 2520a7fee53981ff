"""The module `torch.standin`, through which torch's Python code uses the stand-in device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

NAME = "standin"


class Stream(torch.Stream):
    """A stream of the given device, by default the current one."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Stream:
        if known:
            return super().__new__(cls, **known)
        return super().__new__(cls, device=_device(device), priority=priority)


class Event(torch.Event):
    """An event of the device."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, **known: Any) -> Event:
        return super().__new__(cls, NAME, enable_timing=enable_timing)


def _device(device: Any = None) -> torch.device:
    if device is None:
        return torch.device(NAME, current_device())
    if isinstance(device, int):
        return torch.device(NAME, device)
    device = torch.device(device)
    return torch.device(NAME, current_device()) if device.index is None else device


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    pass


def device_count() -> int:
    return torch.ops.standin.count_devices()


def current_device() -> int:
    return torch.ops.standin.get_device()


def set_device(device: Any) -> None:
    torch.ops.standin.set_device(_device(device).index)


@contextmanager
def device(chosen: Any) -> Iterator[None]:
    before = current_device()
    set_device(chosen)
    try:
        yield
    finally:
        set_device(before)


def get_device_name(device: Any = None) -> str:
    return "stand-in device"


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_device(device))


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_device(device))


def default_stream(device: Any = None) -> torch.Stream:
    chosen = _device(device)
    number = current_stream(chosen).device_type
    return torch.Stream(stream_id=0, device_index=chosen.index, device_type=number)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(chosen: torch.Stream | None) -> Iterator[None]:
    if chosen is None:
        yield
        return
    before = current_stream(chosen.device)
    set_stream(chosen)
    try:
        yield
    finally:
        set_stream(before)


def _generator(device: Any = None) -> torch.Generator:
    return torch.ops.standin.get_generator(_device(device).index)


def get_rng_state(device: Any = NAME) -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: Any = NAME) -> None:
    _generator(device).set_state(state)


def manual_seed(seed: int) -> None:
    _generator(NAME).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def initial_seed() -> int:
    return _generator(NAME).initial_seed()


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def memory_allocated(device: Any = None) -> int:
    return 0


def empty_cache() -> None:
    pass
