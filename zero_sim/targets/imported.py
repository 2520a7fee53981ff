"""A target of somebody else: imported, made, and held to what a target has to be.

Whatever its code does on that way is a mistake in it, told with its own frames; nothing has been
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
from zero_sim.host.signals import heard_count, interrupt, listening
from zero_sim.scenario.suggest import did_you_mean
from zero_sim.targets.protocol import Target

_ABSENT = object()


def load_target(name: str) -> Target:
    """Import a target; runs its code.

    Args:
        name: `module:name`: a module, found in the current folder too, and what in it is the
            target: an object, or a class made without arguments.

    Raises:
        UsageError: There is no such module or name in it, its code does not come through, or what
            it names is no target.
    """
    said = f"--target {name}"
    module = import_module(name, said=said, form="--target module:name")
    attribute = name.partition(":")[2]
    with theirs(f"{attribute!r} of {said} to be a target, or a class to make one"):
        target = attribute_of(module, attribute, said=said)
        if isinstance(target, type):
            target = target()
    return check_target(target, of=said)


def import_module(name: str, *, said: str, form: str) -> ModuleType:
    """Import the module of a `module:name`; runs its code.

    Args:
        name: It, found in the current folder too.
        said: How the user said it, such as `--target module:name`.
        form: How it should be said.

    Raises:
        UsageError: There is no such module, or its code does not come through.
    """
    module_name = name.partition(":")[0]
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    supervisor.note(f"the import of {name}")
    with theirs(f"the module of {said} to be imported"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # Of what the module itself imports.
            raise _Said(
                f"expected an importable module before the colon, got {said}. Try "
                "running in its folder, or installing it."
            ) from None
        except ValueError:
            if module_name:
                raise
            raise _Said(f"expected {form}, got {name!r}.") from None
    return module


def attribute_of(module: ModuleType, name: str, *, said: str) -> Any:
    """Return an attribute of a module; used within `theirs`, because it may run code.

    Args:
        module: The module of a `module:name`.
        name: The name in it.
        said: As for `import_module`.

    Raises:
        UsageError: The module lacks the name; the message has the nearest one.
    """
    found = getattr(module, name, _ABSENT)
    if found is not _ABSENT:
        return found
    near = did_you_mean(name, (each for each in vars(module) if not each.startswith("_")))
    where = getattr(module, "__file__", None) or "no file"
    raise _Said(
        f"expected module {module.__name__!r} to have the name {name!r} of {said}, got none such "
        f"in {where}.{near}"
    )


def check_target(target: Any, *, of: str) -> Target:
    """What somebody gave for a target, if it is one.

    Args:
        target: Anything.
        of: Where it comes from, for the error.

    Raises:
        UsageError: It lacks something, or its `build` cannot be called as it will be.
    """
    with theirs(f"the attributes of {of} to be read"):
        build, has_name = getattr(target, "build", None), hasattr(target, "name")
    if build is None or not has_name:
        raise UsageError(
            f"expected a target, with `name` and `build`, got {target!r} from {of}. "
            "zero_sim.targets.Target says what it needs."
        )
    if not callable(build):
        raise UsageError(f"expected `build` of {of} to be a method, got {build!r}.")
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):
        return target  # Written in C: nothing is known of it.
    try:
        signature.bind(object(), scenario=object(), group=object())
    except TypeError as error:
        raise UsageError(
            f"expected `build` of {of} to take (module, *, scenario, group), got "
            f"build{signature}: {error}."
        ) from None
    return target


class _Said(UsageError):
    """An error that needs none of the user's frames."""


@contextlib.contextmanager
def theirs(expected: str) -> Iterator[None]:
    """Whatever code of somebody else raises becomes an error about it.

    Raises:
        UsageError: It raised something, `SystemExit` and what Ctrl-C raises among that.
        KeyboardInterrupt: There was a Ctrl-C.
    """
    before = heard_count()
    try:
        with listening(interrupt):
            yield
    except _Said:
        raise
    except BaseException as error:  # noqa: BLE001  It must not end this process in its own way.
        if heard_count() != before:
            raise KeyboardInterrupt from None
        if isinstance(error, SystemExit):
            what = "SystemExit, which ends the process"
        else:
            what = type(error).__name__
        shown = "\n".join(f"  {line}" for line in show_error(error).splitlines())
        raise UsageError(f"expected {expected}, got {what}:\n{shown}") from None
