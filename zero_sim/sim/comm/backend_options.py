"""The backend object of a simulated group.

In each group, torch keeps a backend object per kind of device and reads its name, options and
features. Simulated groups have no C++ backend, and some versions of torch cannot subclass the C++
class. So `SimBackend` replaces it, and passes collectives on to the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroupGloo

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""gloo's default in torch. Simulated calls do not time out by default."""


class Members(Protocol):
    """Attributes that a backend object needs from its group."""

    @property
    def group_name(self) -> str:
        """Name of the group in c10d."""
        ...

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """The members' world ranks."""
        ...


@dataclass(kw_only=True, slots=True)
class BackendOptions:
    """The fields of torch's `Backend.Options`."""

    backend: str
    _group: Members
    _timeout: timedelta

    @property
    def group_name(self) -> str:
        """Name of the group in c10d."""
        return self._group.group_name

    @property
    def global_ranks_in_group(self) -> list[int]:
        """The members' world ranks."""
        # Built on request, because every rank has options.
        return list(self._group.world_ranks)


class SimBackend:
    """A group's backend object, which takes all other attributes from the group.

    Args:
        group: The simulated group, which receives the collectives.
        name: The requested backend, such as `gloo`; `sim` by default.
        timeout: Time-out in `options`.
    """

    # torch reads these before it uses optional features.

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_tensor_alloc = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False

    def __init__(self, group: Members, *, name: str, timeout: timedelta) -> None:
        # First, because `__getattr__` uses it.
        self._group = group
        self._name = name
        self.options = BackendOptions(
            backend=name,
            _group=group,
            _timeout=timeout,
        )

    def name(self) -> str:
        """Return the requested backend's name."""
        return self._name

    _get_backend_name = name

    def create_device(self, **arguments: Any) -> Any:
        """Return a device for gloo's options, which simulated calls do not use."""
        return ProcessGroupGloo.create_device(**arguments)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    set_timeout = _set_default_timeout

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling look these up before `__init__`, so they would recurse.
        if name.startswith("__") or name == "_group":
            raise AttributeError(name)
        return getattr(self._group, name)


def present_devices() -> list[str]:
    """Return the kinds of device on this machine, the CPU first."""
    # Only a device that works, not every device that torch was built for.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]
