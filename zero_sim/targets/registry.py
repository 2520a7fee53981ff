"""Registered targets by name, and the import of a user's target."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module

from zero_sim.errors import UsageError
from zero_sim.scenario.suggest import nearest
from zero_sim.targets.imported import load_target
from zero_sim.targets.protocol import Target


def _by_name(names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    return {name: f"zero_sim.targets.{module}" for module in names for name in names[module]}


# Names only: a module is imported when a case names its target, because imports take time and other
# modules may need packages that are not installed.
_TARGETS = _by_name(
    {
        "own": ["zero_sim"],
        "single_device": ["single-device", "single-device-keeping-grads"],
        "torch.ddp": ["torch-ddp", "torch-ddp-as-is", "torch-zero-redundancy"],
        "torch.fsdp1": ["torch-fsdp1", "torch-fsdp1-as-is"],
        "torch.fsdp2": ["torch-fsdp2", "torch-fsdp2-as-is"],
    }
)
"""Module whose `TARGETS` contain the target, by the target's name."""

_LIBRARIES = _by_name(
    {
        "deepspeed.declaration": [
            *("deepspeed-zero-0", "deepspeed-zero-1", "deepspeed-zero-2", "deepspeed-zero-3"),
            *("deepspeed-zero-0-as-is", "deepspeed-zero-1-as-is", "deepspeed-zero-3-as-is"),
        ],
        "megatron.core": ["megatron-core"],
        "megatron.fsdp": ["megatron-fsdp", "megatron-fsdp-as-is"],
    }
)
"""The same for targets whose library needs an extra."""


@cache
def _registered(name: str) -> Target | None:
    module = _TARGETS.get(name) or _LIBRARIES.get(name)
    if module is None:
        return None
    (target,) = (each for each in import_module(module).TARGETS if each.name == name)
    return target


def target_names() -> tuple[str, ...]:
    """Return the names of registered targets that need no package besides torch."""
    return tuple(sorted(_TARGETS))


def library_target_names() -> tuple[str, ...]:
    """Return the names of registered targets whose library may not be installed."""
    return tuple(sorted(_LIBRARIES))


def find_target(name: str) -> Target:
    """Return the registered target with a name.

    Raises:
        UsageError: There is none; the message lists the nearest names.
    """
    target = _registered(name)
    if target is None:
        known = (*target_names(), *library_target_names())
        raise UsageError(
            f"expected a registered target, got {name!r}. Choose {nearest(name, known)}. "
            "Name a target of your own with --target module:name."
        )
    return target


def name_of(target: Target) -> str:
    """Return the name by which `import_target` finds a target again; "" if there is none.

    Args:
        target: A registered target, or a module's global, or an object without state, which can be
            made again from the name of its class.
    """
    if _registered(target.name) is target:
        return target.name
    made_by = type(target)
    module = sys.modules.get(made_by.__module__)
    # Another process has another `__main__`.
    if module is None or made_by.__module__ == "__main__":
        return ""
    held = [name for name, value in vars(module).items() if value is target]
    # If `__dict__` is empty, a new object of the class equals this object. An object without a
    # `__dict__` (True here) has slots, which may contain state.
    if not held and not getattr(target, "__dict__", True):
        held = [name for name, value in vars(module).items() if value is made_by]
    return f"{made_by.__module__}:{held[0]}" if held else ""


def import_target(name: str) -> Target:
    """Return a registered target, or import `module:name`, which runs the module's code.

    Args:
        name: A registered name, or `module:name` as for `load_target`.

    Raises:
        UsageError: The module or name does not exist, its code raises, or the object is no target.
    """
    return load_target(name) if ":" in name else find_target(name)
