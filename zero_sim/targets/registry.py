"""The targets that a scenario may name, and how a user's own is found."""

from __future__ import annotations

import sys

from zero_sim.errors import UsageError
from zero_sim.scenario.suggest import closest
from zero_sim.targets.accelerate.declaration import ACCELERATE_DDP, ACCELERATE_FSDP2
from zero_sim.targets.deepspeed.declaration import DEEPSPEED
from zero_sim.targets.imported import load_target
from zero_sim.targets.megatron.core import MegatronCore
from zero_sim.targets.megatron.fsdp import MEGATRON_FSDP
from zero_sim.targets.own import ZeroSimTarget
from zero_sim.targets.protocol import Target
from zero_sim.targets.single_device import SingleDevice
from zero_sim.targets.torch.ddp import TorchDDP, TorchZeroRedundancy
from zero_sim.targets.torch.fsdp1 import TorchFSDP1
from zero_sim.targets.torch.fsdp2 import TorchFSDP2

_TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        ZeroSimTarget(),
        SingleDevice(),
        SingleDevice(name="single-device-keeping-grads", keeps_grads=True),
        TorchDDP(),
        TorchDDP(as_is=True),
        TorchZeroRedundancy(),
        TorchFSDP1(),
        TorchFSDP1(as_is=True),
        TorchFSDP2(),
        TorchFSDP2(as_is=True),
    )
}

_LIBRARIES: dict[str, Target] = {
    target.name: target
    for target in (
        *DEEPSPEED,
        MegatronCore(),
        *MEGATRON_FSDP,
        *ACCELERATE_DDP,
        *ACCELERATE_FSDP2,
    )
}
"""Targets of libraries that are installed with an extra; they are imported when they are used."""


def target_names() -> tuple[str, ...]:
    """Names of all registered targets that need no package besides torch."""
    return tuple(sorted(_TARGETS))


def library_target_names() -> tuple[str, ...]:
    """Names of all registered targets of libraries that may not be installed."""
    return tuple(sorted(_LIBRARIES))


def find_target(name: str) -> Target:
    """The registered target of that name.

    Raises:
        UsageError: There is none; lists those there are.
    """
    if name in _LIBRARIES:
        return _LIBRARIES[name]
    if name not in _TARGETS:
        known = (*target_names(), *library_target_names())
        near = closest(name, known)
        like = f"Try {near!r}. " if near is not None else ""
        raise UsageError(
            f"expected system.target to be one of {', '.join(known)}, got {name!r}. {like}A "
            "target of your own is named with --target module:name."
        )
    return _TARGETS[name]


def name_of(target: Target) -> str:
    """The name by which `import_target` finds a target again; empty where it has none.

    Args:
        target: A registered one; one that a module has under a name; or an object without any
            state, which its class makes as well.
    """
    if (_TARGETS.get(target.name) or _LIBRARIES.get(target.name)) is target:
        return target.name
    made_by = type(target)
    module = sys.modules.get(made_by.__module__)
    if module is None or made_by.__module__ == "__main__":
        return ""
    held = [name for name, value in vars(module).items() if value is target]
    if not held and not getattr(target, "__dict__", True):
        held = [name for name, value in vars(module).items() if value is made_by]
    return f"{made_by.__module__}:{held[0]}" if held else ""


def import_target(name: str) -> Target:
    """A registered target, or for `module:name` one imported from a module; runs its code.

    Args:
        name: A registered name; or a module, found in the current folder too, and what in it is
            the target: an object, or a class made without arguments.

    Raises:
        UsageError: There is no such module or name in it, its code does not come through, or what
            it names is no target.
    """
    return load_target(name) if ":" in name else find_target(name)
