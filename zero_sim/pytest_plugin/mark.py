"""The mark `world_size`: number of ranks, world settings, and tests that cannot have it."""

from __future__ import annotations

import difflib
import operator
import unittest
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from zero_sim.errors import UsageError
from zero_sim.host.arguments import WORLD_SETTINGS, check_kind, is_of_kind, unrun_function

MARK = "world_size"
WANTED: pytest.StashKey[Wanted] = pytest.StashKey()
_HINT = f"Try @pytest.mark.{MARK}(4)."
# Wrong keywords for the number of ranks. The error for them shows the right form.
_SIZE_WORDS = ("size", "world_size", "n", "ranks", "nprocs", "num_ranks")


class Refused(pytest.fail.Exception):
    """Error of a test that cannot run as marked. `xfail` and similar marks do not excuse it."""

    # pytest's summaries show the qualified name; keep it short.
    __module__ = "builtins"

    def __init__(self, item: pytest.Item, message: str) -> None:
        path, line, _ = item.location
        where = path if line is None else f"{path}:{line + 1}"
        super().__init__(f"{where}: {message}", pytrace=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Settings in a mark."""

    size: int
    """Number of ranks."""
    settings: Mapping[str, Any]
    """Keyword arguments for `zero_sim.sim.World`."""


def read_mark(item: pytest.Item) -> Wanted | None:
    """Return the settings in a test's closest mark; None without a mark.

    Raises:
        Refused: If the mark is wrong, if one level has several marks, or if tests of this kind
            cannot run on ranks.
    """
    marks = _closest(item)
    if not marks:
        return None
    if len(marks) > 1:
        shown = " and ".join(map(_show, marks))
        raise Refused(
            item,
            f"expected one mark in a place, got {shown}. For several sizes, write "
            f"@pytest.mark.{MARK}(2, 4). A class and its base are one place.",
        )
    wanted = _read(item, marks[0])
    _check_kind(item)
    return wanted


def _closest(item: pytest.Item) -> list[pytest.Mark]:
    """Return the marks of the closest node that has the mark."""
    # From the test outwards to the session.
    for node in reversed(item.listchain()):
        # `get_closest_marker` would hide a second mark at the same level.
        marks = [mark for mark in node.own_markers if mark.name == MARK]
        if marks:
            return marks
    return []


def _read(item: pytest.Item, mark: pytest.Mark) -> Wanted:
    got = _show(mark)
    for name, value in mark.kwargs.items():
        if name not in WORLD_SETTINGS:
            raise Refused(item, f"{got}: there is no setting {name!r}{_meant(name)}")
        try:
            check_kind(name, value, WORLD_SETTINGS[name])
        except UsageError as error:
            raise Refused(item, f"{got}: {error}.") from None
    if not are_sizes(sizes_of(mark)):
        raise Refused(
            item,
            f"{got}: expected one or several numbers of ranks, positive integers. Name other "
            f"settings. {_HINT}",
        )
    size, *others = sizes_of(mark)
    if others:
        assert isinstance(item, pytest.Function)
        # `parametrize_sizes` made one test per size.
        size = item.callspec.params[MARK]
    # Convert numpy's integers, for example.
    return Wanted(size=operator.index(size), settings=dict(mark.kwargs))


def sizes_of(mark: pytest.Mark) -> tuple[Any, ...]:
    """Return the sizes in a mark, given as arguments or as one list."""
    args = mark.args
    is_list = len(args) == 1 and isinstance(args[0], list | tuple)
    return tuple(args[0]) if is_list else args


def are_sizes(sizes: tuple[Any, ...]) -> bool:
    """Return True for one or more positive integers."""
    return bool(sizes) and all(is_of_kind(size, "an integer") and size >= 1 for size in sizes)


def parametrize_sizes(metafunc: pytest.Metafunc) -> None:
    """If a mark has several sizes, make one test for each, such as `test_sum[2-ranks]`."""
    mark = metafunc.definition.get_closest_marker(MARK)
    sizes = () if mark is None else sizes_of(mark)
    # A wrong mark is refused during setup, where the error shows its line.
    if len(sizes) < 2 or not are_sizes(sizes):
        return
    # pytest only parametrizes fixtures in use.
    if MARK not in metafunc.fixturenames:
        metafunc.fixturenames.append(MARK)
    metafunc.parametrize(MARK, sizes, ids=[f"{size}-ranks" for size in sizes], indirect=True)


def _meant(name: str) -> str:
    known = ", ".join(WORLD_SETTINGS)
    if name in _SIZE_WORDS:
        return f". Give the number of ranks first, without a name. {_HINT}"
    near = difflib.get_close_matches(name.lower(), list(WORLD_SETTINGS), n=1)
    return f"; did you mean {near[0]!r}? Settings: {known}." if near else f". Settings: {known}."


def _show(mark: pytest.Mark) -> str:
    arguments = [repr(value) for value in mark.args]
    arguments += [f"{name}={value!r}" for name, value in mark.kwargs.items()]
    return f"{MARK}({', '.join(arguments)})"


def _check_kind(item: pytest.Item) -> None:
    """Refuse a test unless it runs as a plain function on every rank."""
    if not isinstance(item, pytest.Function):
        raise Refused(
            item,
            f"expected {MARK} on a test function, got it on {item.name!r}, a "
            f"{type(item).__name__}, which does not run on ranks. Remove the mark.",
        )
    # unittest calls the method itself, so pytest_pyfunc_call does not run.
    if item.cls is not None and issubclass(item.cls, unittest.TestCase):
        raise Refused(
            item,
            f"expected {MARK} on a function or a method of a plain class, got it on a method of "
            f"{item.cls.__name__}, a unittest.TestCase, which would run outside of the ranks. "
            "Use a plain class, fixtures instead of setUp, and `rank` as an argument.",
        )
    unrun = unrun_function(item.obj)
    if unrun == "an async def function":
        raise Refused(item, f"{is_async()} Use a plain function that calls asyncio.run(...).")
    if unrun is not None:
        raise Refused(item, "expected a test function, got a generator. Remove `yield`.")
    # Plugins for async tests override it and would run the test on no rank.
    if type(item).runtest is not pytest.Function.runtest:
        raise Refused(
            item,
            f"expected {MARK} on a test that pytest itself runs, got it on {item.name!r}, a "
            f"{type(item).__name__}, which its plugin runs on no rank. Remove the mark or the "
            "plugin.",
        )


def is_async() -> str:
    """Return the error for an async test. It begins like pytest's own."""
    return (
        f"async def functions are not natively supported, nor by a plugin under {MARK}, because "
        "nothing would await them on a rank."
    )


def check_arguments(item: pytest.Function, wanted: Wanted, arguments: Iterable[str]) -> None:
    """Refuse test arguments that contradict the mark.

    Raises:
        Refused: If `rank` or `world_size` is a parameter or another plugin's fixture.
    """
    # The fixture `rank` is -1 until a rank calls the test.
    own = {"rank": -1, MARK: wanted.size}
    for name in own.keys() & set(arguments):
        if item.funcargs[name] != own[name]:
            raise Refused(
                item,
                f"expected `{name}` to be the fixture of the mark {MARK}({wanted.size}), got "
                f"{item.funcargs[name]!r} from a parameter or another fixture. Use another "
                f"name. For several sizes, use pytest.param(n, marks=pytest.mark.{MARK}(n)).",
            )
