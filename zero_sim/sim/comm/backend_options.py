"""The backend object that a simulated group offers per kind of device.

In each group, torch keeps one backend object per device and reads its name, options and features.
Simulated groups have no C++ backend, and not every supported version of torch allows to inherit
from the C++ class. So this class replaces it, and passes collectives on to the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroupGloo

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""Default of torch's gloo. A simulated call without a time-out never reaches it."""


class Members(Protocol):
    """The attributes of a group that its backend object needs."""

    @property
    def group_name(self) -> str:
        """Name of the group in c10d."""
        ...

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """World ranks of the members."""
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
        """World ranks of the members. Built on request, because every rank has options."""
        return list(self._group.world_ranks)


class SimBackend:
    """Backend object of a group. Attributes that it lacks are taken from the group.

    Args:
        group: The simulated group that receives the collectives.
        name: Name of the requested backend, such as `gloo`; `sim` if none was requested.
        timeout: Time-out in `options`.
    """

    # torch reads these before it uses an optional feature.

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_tensor_alloc = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False

    def __init__(self, group: Members, *, name: str, timeout: timedelta) -> None:
        # First, because `__getattr__` falls back to it.
        self._group = group
        self._name = name
        self.options = BackendOptions(
            backend=name,
            _group=group,
            _timeout=timeout,
        )

    def name(self) -> str:
        """Return the name of the requested backend."""
        return self._name

    _get_backend_name = name

    def create_device(self, **asked: Any) -> Any:
        """Return a device for gloo's options. Simulated calls do not use it."""
        return ProcessGroupGloo.create_device(**asked)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    set_timeout = _set_default_timeout

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling look up these before `__init__` has run, and would recurse.
        if name.startswith("__") or name == "_group":
            raise AttributeError(name)
        return getattr(self._group, name)


def present_devices() -> list[str]:
    """Return the kinds of device on this machine, the CPU first."""
    # Only devices that work count, not those that torch was built for.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]
