"""The backend that a simulated group shows for a kind of device: what torch asks of it by name.

torch keeps one backend object a device in each group and asks it for its name, its options and what
it can do. Simulated groups have none of C++, and a class of C++ cannot be inherited from on every
supported version, so that this stands in its place and hands collectives on to the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroupGloo

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""What torch's gloo says where nobody set another; a simulated call ends without one."""


class Members(Protocol):
    """What the face needs of the group behind it."""

    @property
    def group_name(self) -> str:
        """The name under which c10d knows it."""
        ...

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """World ranks of its members."""
        ...


@dataclass(kw_only=True, slots=True)
class BackendOptions:
    """The fields of torch's `Backend.Options`."""

    backend: str
    _group: Members
    _timeout: timedelta

    @property
    def group_name(self) -> str:
        """The name under which c10d knows the group."""
        return self._group.group_name

    @property
    def global_ranks_in_group(self) -> list[int]:
        """World ranks of its members; made when asked, since every rank has options."""
        return list(self._group.world_ranks)


class SimBackend:
    """The face of a group's backend; what it does not have itself is the group's.

    Args:
        group: The simulated group to which collectives are handed.
        name: The backend that was asked for, such as `gloo`; `sim` where none was.
        timeout: What `options` says.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_tensor_alloc = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False

    def __init__(self, group: Members, *, name: str, timeout: timedelta) -> None:
        self._group = group
        self._name = name
        self.options = BackendOptions(
            backend=name,
            _group=group,
            _timeout=timeout,
        )

    def name(self) -> str:
        """The backend that was asked for."""
        return self._name

    _get_backend_name = name

    def create_device(self, **asked: Any) -> Any:
        """A device as gloo's options take it; simulated calls need none."""
        return ProcessGroupGloo.create_device(**asked)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    set_timeout = _set_default_timeout

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_group":
            raise AttributeError(name)
        return getattr(self._group, name)


def present_devices() -> list[str]:
    """The kinds of device that this machine has, the CPU first."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]
