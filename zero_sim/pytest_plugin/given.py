"""Hypothesis's `@given` under the mark: each example is drawn once for all ranks."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from zero_sim.pytest_plugin.mark import Refused

_OF_RANKS = {"rank", "world_size"}


def is_given(item: pytest.Item) -> bool:
    """Return True if Hypothesis draws the test's arguments."""
    return bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))


def allow_rank_fixtures(item: pytest.Item) -> None:
    """Turn off Hypothesis's deadline and health checks if they do not suit a test on ranks.

    One check refuses fixtures that are not set up again for each example. `rank` and `world_size`
    need no set-up, so they are allowed; other fixtures are still checked. The deadline assumes one
    thread on an idle machine, but an example takes as long as its slowest rank.
    """
    # Imported late, because only tests with `@given` need it.
    from hypothesis import HealthCheck, Phase, settings

    function = getattr(item.obj, "__func__", item.obj)  # type: ignore[attr-defined]
    # Not settings.default, which Hypothesis declares as possibly None.
    now = getattr(function, "_hypothesis_internal_use_settings", settings())
    needless = set(now.suppress_health_check)
    if hasattr(item, "callspec"):
        # Each parametrized test of a class has its own instance.
        needless.add(HealthCheck.differing_executors)
    named = set(inspect.signature(function).parameters) & set(getattr(item, "fixturenames", ()))
    # Values of `parametrize` are not fixtures, so they need no set-up.
    callspec = getattr(item, "callspec", None)
    values = set() if callspec is None else set(callspec.params)
    if named - values - {"self"} <= _OF_RANKS:
        needless.add(HealthCheck.function_scoped_fixture)
    # Hypothesis's own pytest plugin sets this attribute for the same purpose.
    function._hypothesis_internal_use_settings = settings(
        now,
        suppress_health_check=needless,
        deadline=None,
        # It would report lines of the simulated world.
        phases=[phase for phase in now.phases if phase is not Phase.explain],
    )


@contextlib.contextmanager
def on_all_ranks(
    item: pytest.Function, run: Callable[[Callable[..., object], dict[str, Any]], None]
) -> Iterator[None]:
    """Make Hypothesis pass each example to all ranks instead of to the test function.

    `run` runs a function on all ranks, with the drawn arguments by name.
    """
    from hypothesis.control import _current_build_context
    from hypothesis.strategies import DataObject

    handle = item.obj.hypothesis
    inner = handle.inner_test

    @functools.wraps(inner)
    def run_example(*positional: Any, **drawn: Any) -> None:
        for name, value in drawn.items():
            if isinstance(value, DataObject):
                raise Refused(
                    item,
                    f"expected arguments that are drawn before the ranks start, got {name} = "
                    "data(), because each rank would draw from it. Draw a composite strategy.",
                )
        __tracebackhide__ = True
        context = _current_build_context.value

        def on_rank(**arguments: Any) -> object:
            __tracebackhide__ = True
            # Rank threads do not inherit this context, but `assume`, `note` and `target` need it.
            with _current_build_context.with_value(context):
                # `positional` is the instance if the test is a method.
                return inner(*positional, **arguments)

        run(on_rank, drawn)

    # Hypothesis reads this attribute for each run. Plugins for async tests replace it, too.
    handle.inner_test = run_example
    try:
        yield
    finally:
        handle.inner_test = inner
