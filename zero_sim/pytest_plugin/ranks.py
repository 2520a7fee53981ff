"""A marked test on every rank of a simulated world."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import os
import sys
import unittest
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from zero_sim.errors import EnvironmentProblem, UsageError
from zero_sim.host.arguments import unrun_result
from zero_sim.pytest_plugin.given import is_given, on_all_ranks
from zero_sim.pytest_plugin.mark import Refused, Wanted, check_arguments, is_async
from zero_sim.pytest_plugin.resources import SessionResources

if TYPE_CHECKING:
    from zero_sim.sim import World


class ProcessEnded(BaseException):
    """Error of os._exit on a rank. A BaseException, so that tests do not catch it."""

    # pytest's summaries show the qualified name; keep it short.
    __module__ = "builtins"


# Fixtures that replace sys.stdout. A prefix would change the text for the test.
_CAPTURES = {"capsys", "capfd", "capsysbinary", "capfdbinary"}
SKIPS = (pytest.skip.Exception, unittest.SkipTest)


def program_of(item: pytest.Function, wanted: Wanted) -> Callable[[int], None]:
    """Return a test, after its fixtures are set up, as a function of the rank.

    Raises:
        Refused: If an argument contradicts the mark. The returned function raises it, too, if the
            test returns a value.
    """
    return _program(item, item.obj, _arguments_of(item, wanted))


def _arguments_of(item: pytest.Function, wanted: Wanted) -> dict[str, Any]:
    """Return the values of the function's fixtures, without autouse fixtures."""
    names = inspect.signature(item.obj).parameters
    arguments = {name: item.funcargs[name] for name in names if name in item.funcargs}
    check_arguments(item, wanted, arguments)
    return arguments


def _program(
    item: pytest.Function, function: Callable[..., object], arguments: Mapping[str, Any]
) -> Callable[[int], None]:
    def program(rank: int) -> None:
        __tracebackhide__ = True
        # Only if the function has this parameter.
        own = {"rank": rank} if "rank" in arguments else {}
        _check_returned(item, function(**{**arguments, **own}))

    return program


def _check_returned(item: pytest.Function, returned: object) -> None:
    """Refuse a returned value: either the body never ran, or an assert was forgotten."""
    if returned is None:
        return
    unrun = unrun_result(returned)
    if unrun == "an async def function":
        raise Refused(item, f"{is_async()} Use a plain function that calls asyncio.run(...).")
    if unrun is not None:
        raise Refused(item, "expected a test function, got a generator, whose body never ran.")
    raise Refused(
        item,
        f"expected the test to return None, got {returned!r}. Did you mean to assert it?",
    )


def run_simulated(resources: SessionResources, item: pytest.Function, wanted: Wanted) -> None:
    """Run a test on every rank of a simulated world.

    Raises:
        Refused: If the mark's settings are invalid.
    """
    try:
        world = resources.world(wanted.size, wanted.settings)
    except UsageError as error:
        raise Refused(item, f"{error}.") from None
    except EnvironmentProblem as error:
        pytest.fail(f"this machine cannot run it: {error}", pytrace=False)
    item.user_properties.append(("zero_sim.world", _describe(world)))
    arguments = _arguments_of(item, wanted)

    def run(program: Callable[[int], None]) -> None:
        # pytest leaves frames with this variable out of tracebacks.
        __tracebackhide__ = True
        with _labelled_output(item, wanted):
            _run_on_ranks(world, program, wanted=wanted, in_rank=resources.in_rank)

    if not is_given(item):
        run(_program(item, item.obj, arguments))
        return

    def run_example(function: Callable[..., object], drawn: dict[str, Any]) -> None:
        __tracebackhide__ = True

        def program(rank: int) -> None:
            __tracebackhide__ = True
            # A copy per rank, because ranks would share the memory of a drawn array.
            _program(item, function, copy.deepcopy(drawn))(rank)

        run(program)

    with on_all_ranks(item, run_example):
        item.obj(**arguments)


def _run_on_ranks(
    world: World,
    call: Callable[[int], None],
    *,
    wanted: Wanted,
    in_rank: Callable[[], AbstractContextManager[object]],
) -> None:
    """Run a program on every rank. Raise a rank's error, or skip if all ranks skip."""
    __tracebackhide__ = True
    from zero_sim.sim import RankFailed, WorldFailure

    skips, ended = dict[int, BaseException](), set[int]()

    def program(rank: int) -> None:
        __tracebackhide__ = True
        try:
            with in_rank():
                call(rank)
        except SKIPS as skip:
            # The world goes on, because another rank may still fail.
            skips[rank] = skip
        else:
            ended.add(rank)

    settings = _describe(world)
    try:
        with _held_exits() as exits, _without_c10d_log():
            world.run(program)
    except RankFailed as failed:
        # The rank's own exception, so that pytest shows its assertion and line.
        error = failed.error
        error.add_note(f"on rank {failed.rank} of {settings}")
        for line in _skip_lines(skips):
            error.add_note(line)
        raise error from None
    except WorldFailure as failed:
        lines = [str(failed), f"in a world of {settings}", *_skip_lines(skips)]
        raise pytest.fail.Exception("\n".join(lines), pytrace=False) from None
    if exits:
        # Again, because the test may have caught it.
        raise exits[0]
    if len(skips) == wanted.size:
        raise skips[0] from None
    check_all_ran(wanted, skips={rank: str(skip) for rank, skip in skips.items()}, ended=ended)


@contextlib.contextmanager
def _without_c10d_log() -> Iterator[None]:
    """Silence torch's debug log of failed calls, which repeats the error that fails the test."""
    # torch's default logger for c10d: its only handler discards everything, but pytest captures it.
    logger = logging.getLogger("c10d-NullHandler-default")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _labelled_output(item: pytest.Function, wanted: Wanted) -> Iterator[None]:
    """Prefix each printed line with its rank, unless the test captures output itself."""
    if _CAPTURES & set(item.fixturenames):
        yield
        return
    from zero_sim.script.output import CALLER, RankOutput
    from zero_sim.sim.world.rank_threads import rank_state

    def writer() -> int:
        return CALLER if rank_state.rank is None else rank_state.rank

    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    labelled = {
        name: RankOutput(stream, writer=writer, shown=None) for name, stream in streams.items()
    }
    for name, output in labelled.items():
        setattr(sys, name, output)
    try:
        yield
    finally:
        for name, output in labelled.items():
            for rank in range(wanted.size):
                output.end_rank(rank)
            # Unless a debugger has put the terminal in its place.
            if getattr(sys, name) is output:
                setattr(sys, name, streams[name])


@contextlib.contextmanager
def _held_exits() -> Iterator[list[ProcessEnded]]:
    """Keep ranks from ending the process, because it runs all ranks and all later tests.

    Yields:
        Refused calls of os._exit.
    """
    from zero_sim.sim.world.c10d import rank_state

    pid, exit_process, exits = os.getpid(), os._exit, list[ProcessEnded]()

    def hold(status: int) -> NoReturn:
        __tracebackhide__ = True
        # Allowed in forked children and in threads that are not ranks.
        if os.getpid() != pid or rank_state.c10d_world is None:
            exit_process(status)
        exits.append(
            ProcessEnded(
                f"expected no os._exit on a rank, got os._exit({status}), which would end the "
                "whole session. Raise an exception, or use --zero-sim-backend gloo."
            )
        )
        raise exits[-1]

    os._exit = hold
    try:
        yield exits
    finally:
        os._exit = exit_process


def check_all_ran(wanted: Wanted, *, skips: Mapping[int, str], ended: set[int]) -> None:
    """Fail a test if some ranks skipped it or did not finish."""
    if skips:
        others = ", ".join(map(str, sorted(ended)))
        lines = [*_skip_lines(skips), f"not skipped on: {others}"]
        pytest.fail("\n".join(["expected a skip on all ranks or on none:", *lines]), pytrace=False)
    lacking = sorted(set(range(wanted.size)) - ended)
    if lacking:
        ranks = ", ".join(map(str, lacking))
        pytest.fail(
            f"expected the test to end on all ranks, got no end on ranks {ranks}", pytrace=False
        )


def _skip_lines(skips: Mapping[int, object]) -> list[str]:
    return [f"rank {rank} skipped: {reason}" for rank, reason in sorted(skips.items())]


def _describe(world: World) -> str:
    """Describe the settings that decide how a program runs in a world."""
    settings = world.settings
    recipe = settings.schedule
    schedule = recipe if isinstance(recipe, str) else type(recipe).__name__
    return (
        f"{world.world_size} ranks, order {settings.order}, schedule {schedule}, "
        f"timing {settings.timing}, seed {settings.seed}"
    )
