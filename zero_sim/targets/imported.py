"""Import of a user's target, with checks of its form.

If the user's code raises here, the error report shows the frames of this code. Nothing has been
judged yet.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from zero_sim.errors import UsageError
from zero_sim.host import supervisor
from zero_sim.host.frames import show_error
from zero_sim.host.signals import interrupt, listening, received_count
from zero_sim.scenario.suggest import did_you_mean
from zero_sim.targets.protocol import Target

_ABSENT = object()


def load_target(name: str) -> Target:
    """Import a target, which runs its module's code.

    Args:
        name: `module:name`. The module may be in the current folder. The name is a target object in
            it, or a class that takes no arguments.

    Raises:
        UsageError: The module or name does not exist, its code raises, or the object is no target.
    """
    described = f"--target {name}"
    module = import_module(name, described=described, form="--target module:name")
    attribute = name.partition(":")[2]
    with theirs(f"{attribute!r} of {described} to be a target, or a class to make one"):
        target = attribute_of(module, attribute, described=described)
        if isinstance(target, type):
            target = target()
    return check_target(target, of=described)


def import_module(name: str, *, described: str, form: str) -> ModuleType:
    """Import the module in `module:name`, which runs its code.

    Args:
        name: `module:name`; the module may be in the current folder.
        described: The user's option, such as `--target module:name`.
        form: The expected form of the option.

    Raises:
        UsageError: The module does not exist, or its code raises.
    """
    module_name = name.partition(":")[0]
    # The path of a console script contains the script's folder, but not the current folder.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    # If the import ends the process, the supervisor names it.
    supervisor.note(f"the import of {name}")
    with theirs(f"the module of {described} to be imported"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # The module exists, but imports a missing module.
            raise _WithoutFrames(
                f"expected an importable module before the colon, got {described}. Run in its "
                "folder, or install it."
            ) from None
        except ValueError:
            # importlib raises ValueError for an empty name; otherwise the module's code raised it.
            if module_name:
                raise
            raise _WithoutFrames(f"expected {form}, got {name!r}.") from None
    return module


def attribute_of(module: ModuleType, name: str, *, described: str) -> Any:
    """Return a module's attribute. Call it within `theirs`, because it may run code.

    Raises:
        UsageError: The module lacks the name. The message contains the nearest name.
    """
    found = getattr(module, name, _ABSENT)
    if found is not _ABSENT:
        return found
    # Private names are hardly targets.
    near = did_you_mean(name, (each for each in vars(module) if not each.startswith("_")))
    where = getattr(module, "__file__", None) or "no file"
    raise _WithoutFrames(
        f"expected module {module.__name__!r} to have the name {name!r} of {described}, got no "
        f"such name in {where}.{near}"
    )


def check_target(target: Any, *, of: str) -> Target:
    """Return an object if it has the form of a target.

    Args:
        target: Any object.
        of: Origin of the object for messages, such as `--target module:name`.

    Raises:
        UsageError: `name` or `build` is missing, or `build` takes other arguments.
    """
    # Properties run the target's code, too.
    with theirs(f"the attributes of {of} to be read"):
        build, has_name = getattr(target, "build", None), hasattr(target, "name")
    if build is None or not has_name:
        raise UsageError(
            f"expected a target, with `name` and `build`, got {target!r} from {of}. "
            "See zero_sim.targets.Target."
        )
    if not callable(build):
        raise UsageError(f"expected `build` of {of} to be a method, got {build!r}.")
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):
        return target  # Not written in Python. A wrong call raises later.
    # Bind here to report a wrong signature before any rank starts.
    try:
        signature.bind(object(), scenario=object(), group=object())
    except TypeError as error:
        raise UsageError(
            f"expected `build` of {of} to take (module, *, scenario, group), got "
            f"build{signature}: {error}."
        ) from None
    return target


class _WithoutFrames(UsageError):
    """An error that the user's code did not raise, so it has no frames to show."""


@contextlib.contextmanager
def theirs(expected: str) -> Iterator[None]:
    """Turn anything that the user's code raises into a UsageError.

    Raises:
        UsageError: The code raised anything, including SystemExit or its own KeyboardInterrupt.
        KeyboardInterrupt: A signal such as Ctrl-C arrived.
    """
    # The signal count distinguishes Ctrl-C from a KeyboardInterrupt raised by the code.
    before = received_count()
    try:
        with listening(interrupt):
            yield
    except _WithoutFrames:
        raise
    except BaseException as error:  # noqa: BLE001  Also SystemExit, which would end this process.
        if received_count() != before:
            raise KeyboardInterrupt from None
        if isinstance(error, SystemExit):
            what = "SystemExit, which ends the process"
        else:
            what = type(error).__name__
        shown = "\n".join(f"  {line}" for line in show_error(error).splitlines())
        raise UsageError(f"expected {expected}, got {what}:\n{shown}") from None
