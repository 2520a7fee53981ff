"""Rank-local library state: module globals, class attributes and default arguments.

When the baton passes, the previous rank's values are saved and the next rank's values are written.
A rank begins with copies of the values in `World.run`'s caller. Python's containers are copied at
all depths; other objects are shared.
"""

from __future__ import annotations

import collections
import importlib
import inspect
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class NoSuchName(Exception):
    """A name's module, class, function or argument does not exist."""


ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "nothing"})()
"""Stands for the value of a missing name."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Location of a named value."""

    place: Any
    """Module or class; function for a default argument."""
    key: str | int
    """Name in the module or class; position for a default argument."""

    def read(self) -> Any:
        """Return the value, or `ABSENT`."""
        if isinstance(self.key, int):
            return self.place.__defaults__[self.key]
        # By vars(), because getattr would unwrap a staticmethod.
        return vars(self.place).get(self.key, ABSENT)

    def write(self, value: Any) -> None:
        """Write a value; `ABSENT` deletes the name."""
        if isinstance(self.key, int):
            # Defaults are a tuple, so replace all of them.
            defaults = list(self.place.__defaults__)
            defaults[self.key] = value
            self.place.__defaults__ = tuple(defaults)
        elif value is not ABSENT:
            setattr(self.place, self.key, value)
        elif self.key in vars(self.place):
            delattr(self.place, self.key)


class OwnNames:
    """Values of names, exchanged between the process and each rank's saved state.

    Args:
        names: Names such as `module:name`, `module:Class.attribute`, `module:function(argument)`,
            or `module:*` for all data in a module. A global or attribute need not exist yet.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._slots: list[Slot] = []
        self.caller: list[Any] = []
        """The caller's values. Each rank begins with copies."""
        self._saved: dict[int, list[Any]] = {}
        self.skipped: dict[str, str] = {}
        """Reasons by name not found. Another version of the library may have the name."""

    def begin(self, caller: int) -> None:
        """Forget all ranks' values, and save the current values as `caller`'s."""
        # Not in the constructor, because this imports the modules.
        if not self._slots and not self.skipped:
            for name in self._names:
                try:
                    self._slots.extend(find_slots(name))
                except NoSuchName as error:
                    self.skipped[name] = str(error)
        self._saved.clear()
        self.take_out(caller)
        self.caller = self._saved[caller]

    def take_out(self, owner: int) -> None:
        """Save the current values as `owner`'s."""
        self._saved[owner] = [slot.read() for slot in self._slots]

    def put_in_place(self, owner: int) -> None:
        """Write `owner`'s values. A new owner gets copies of the caller's values."""
        values = self._saved.get(owner)
        if values is None:
            values = [copied(value) for value in self.caller]
        for slot, value in zip(self._slots, values, strict=True):
            slot.write(value)

    def saved(self, owner: int) -> list[Any]:
        """Return an owner's saved values in slot order."""
        return self._saved[owner]

    def forget(self) -> None:
        """Drop all saved values."""
        self._saved.clear()


def find_slots(name: str) -> list[Slot]:
    """Return the slot of a name, or all data slots of `module:*`. Imports the module.

    Raises:
        NoSuchName: The module, class, function or argument does not exist.
    """
    module_name, _, path = name.partition(":")
    if path != "*":
        return [find_slot(name)]
    module = _import(module_name)
    return [Slot(module, key) for key, value in vars(module).items() if is_data(key, value)]


def is_data(key: str, value: object) -> bool:
    """Return True if an entry of a module or class may hold rank state."""
    return not key.startswith("__") and not isinstance(value, _NO_DATA)


# Values of these types hold no rank state.
_NO_DATA = (
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    type,
    staticmethod,
    classmethod,
    property,
)


def _import(module_name: str) -> Any:
    try:
        # Try sys.modules first: a module made by hand has no finder.
        return sys.modules.get(module_name) or importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise NoSuchName(f"no module {error.name!r}") from None


def find_slot(name: str) -> Slot:
    """Import a name's module and return its slot.

    Raises:
        NoSuchName: The module, class, function or argument does not exist.
    """
    module_name, _, path = name.partition(":")
    path, _, argument = path.removesuffix(")").partition("(")
    place: Any = _import(module_name)
    *owners, key = path.split(".")
    for owner in owners:
        place = vars(place).get(owner)
        if place is None:
            raise NoSuchName(f"no {owner!r} in it")
    if not argument:
        return Slot(place, key)
    # Unwrap decorators and bound methods, because the function itself has the defaults.
    function = inspect.unwrap(getattr(place, key, None))  # pyrefly: ignore
    function = getattr(function, "__func__", function)
    positions = default_positions(function)
    if argument not in positions:
        raise NoSuchName(f"no default of {argument!r} in it")
    return Slot(function, positions[argument])


def default_positions(function: object) -> dict[str, int]:
    """Return indices in `__defaults__` by name of the positional argument."""
    if not isinstance(function, types.FunctionType) or not function.__defaults__:
        return {}
    code = function.__code__
    # Defaults belong to the last arguments.
    arguments = code.co_varnames[: code.co_argcount][-len(function.__defaults__) :]
    return {name: position for position, name in enumerate(arguments)}


def copied(value: Any) -> Any:
    """Copy Python's containers at all depths; return other values unchanged."""
    # Exact types, because a subclass may hold more than elements, or have another constructor.
    kind = type(value)
    if kind in (list, set, collections.deque):
        return kind(map(copied, value))
    if kind is tuple:
        return tuple(map(copied, value))
    if kind in (dict, collections.OrderedDict):
        return kind((key, copied(each)) for key, each in value.items())
    if kind is collections.defaultdict:
        pairs = ((key, copied(each)) for key, each in value.items())
        return collections.defaultdict(value.default_factory, pairs)
    return value
