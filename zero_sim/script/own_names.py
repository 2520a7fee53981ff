"""Names of libraries that hold what is a rank's own: globals, class attributes, default arguments.

Under the baton the values of the rank that gets it are put in place, and those of whoever had it
are taken out. A rank begins with copies of what the caller of `World.run` has; only containers of
Python are copied, all the way down, and what is in them is the same.
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
    """A name has no place: its module, class, function or argument is not there."""


ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "nothing"})()
"""Stands for the value of a name that is not there."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where the value of a name stands."""

    place: Any
    """A module, a class, or a function for its default arguments."""
    key: str | int
    """The name there; the position of the default argument."""

    def read(self) -> Any:
        """The value; `ABSENT` for none."""
        if isinstance(self.key, int):
            return self.place.__defaults__[self.key]
        # Not by getattr, which takes a method out of what makes it static.
        return vars(self.place).get(self.key, ABSENT)

    def write(self, value: Any) -> None:
        """Put a value there, or nothing."""
        if isinstance(self.key, int):
            defaults = list(self.place.__defaults__)
            defaults[self.key] = value
            self.place.__defaults__ = tuple(defaults)
        elif value is not ABSENT:
            setattr(self.place, self.key, value)
        elif self.key in vars(self.place):
            delattr(self.place, self.key)


class OwnNames:
    """Moves the values of some names between one owner at a time and their saved place.

    Args:
        names: `module:name`, `module:Class.attribute`, `module:function(argument)`, or `module:*`
            for all data of it. A global or an attribute may not be there yet.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._slots: list[Slot] = []
        self.caller: list[Any] = []
        """What the caller has, of which ranks begin with copies."""
        self._saved: dict[int, list[Any]] = {}
        self.skipped: dict[str, str] = {}
        """Names without a place, and why: another version of a library may have them."""

    def begin(self, caller: int) -> None:
        """Forget all ranks, and take out what is in place as `caller`'s."""
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
        """Save what is in place as `owner`'s."""
        self._saved[owner] = [slot.read() for slot in self._slots]

    def put_in_place(self, owner: int) -> None:
        """Make what `owner` has the process's."""
        values = self._saved.get(owner)
        if values is None:
            values = [copied(value) for value in self.caller]
        for slot, value in zip(self._slots, values, strict=True):
            slot.write(value)

    def saved(self, owner: int) -> list[Any]:
        """What an owner had when it was taken out, by place of the name."""
        return self._saved[owner]

    def forget(self) -> None:
        """Let go of everything that ranks had."""
        self._saved.clear()


def find_slots(name: str) -> list[Slot]:
    """Where a name stands, or all data of a module; imports it.

    Raises:
        NoSuchName: There is no such module, class, function or argument.
    """
    module_name, _, path = name.partition(":")
    if path != "*":
        return [find_slot(name)]
    module = _import(module_name)
    return [Slot(module, key) for key, value in vars(module).items() if is_data(key, value)]


def is_data(key: str, value: object) -> bool:
    """Whether an entry of a module or a class can hold what a rank keeps."""
    return not key.startswith("__") and not isinstance(value, _NO_DATA)


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
        return sys.modules.get(module_name) or importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise NoSuchName(f"no module {error.name!r}") from None


def find_slot(name: str) -> Slot:
    """Where a name stands; imports its module.

    Raises:
        NoSuchName: There is no such module, class, function or argument.
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
    function = inspect.unwrap(getattr(place, key, None))  # pyrefly: ignore
    function = getattr(function, "__func__", function)
    positions = default_positions(function)
    if argument not in positions:
        raise NoSuchName(f"no default of {argument!r} in it")
    return Slot(function, positions[argument])


def default_positions(function: object) -> dict[str, int]:
    """Positional arguments of a function that have a default, by their place among those."""
    if not isinstance(function, types.FunctionType) or not function.__defaults__:
        return {}
    code = function.__code__
    arguments = code.co_varnames[: code.co_argcount][-len(function.__defaults__) :]
    return {name: position for position, name in enumerate(arguments)}


def copied(value: Any) -> Any:
    """Containers of Python anew, all the way down; anything else as it is."""
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
