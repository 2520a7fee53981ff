"""Operators that every rank of a script defines under one name, of which a process has one.

torch puts a later definition in the place of an earlier one, whose callers then crash. So the first
rank's definition stays, and what is called is the function of the rank that runs.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from zero_sim.sim.world.rank_threads import rank_state

# By qualified name; an operator outlives the run that defined it. Functions by thread.
_definitions: dict[str, Any] = {}
_functions: dict[str, dict[int, Callable[..., Any]]] = {}


@contextlib.contextmanager
def operators_of_ranks() -> Iterator[None]:
    """Let ranks define operators of one name with `torch.library.custom_op`."""
    original = torch.library.custom_op

    @functools.wraps(original)
    def custom_op(
        name: str,
        fn: Callable[..., Any] | None = None,
        /,
        *,
        mutates_args: Any,
        schema: str | None = None,
        **options: Any,
    ) -> Any:
        if rank_state.join is None:
            return original(name, fn, mutates_args=mutates_args, schema=schema, **options)

        def define(function: Callable[..., Any]) -> Any:
            functions = _functions.setdefault(name, {})
            functions[threading.get_ident()] = function
            if name not in _definitions:
                # Of the function itself: a name in its annotations is one of its module.
                known = schema or torch.library.infer_schema(function, mutates_args=mutates_args)
                _definitions[name] = original(
                    name,
                    _dispatched(function, functions),
                    mutates_args=mutates_args,
                    schema=known,
                    **options,
                )
            return _definitions[name]

        return define if fn is None else define(fn)

    with (
        mock.patch.object(torch.library, "custom_op", custom_op),
        mock.patch.object(torch.library.Library, "__init__", _explained()),
    ):
        for functions in _functions.values():
            functions.clear()
        yield


def _explained() -> Callable[..., None]:
    original = torch.library.Library.__init__

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        try:
            original(*args, **kwargs)
        except RuntimeError as error:
            if rank_state.join is not None:
                error.add_note(
                    "In the simulated world ranks are one process, which can define a library "
                    "once. Try torch.library.custom_op, which each rank may call."
                )
            raise

    return init


def _dispatched(
    first: Callable[..., Any], functions: dict[int, Callable[..., Any]]
) -> Callable[..., Any]:
    @functools.wraps(first)
    def call(*args: Any, **kwargs: Any) -> Any:
        # A shared module defines it once, in whichever rank imports it first.
        function = functions.get(threading.get_ident()) or next(iter(functions.values()), first)
        return function(*args, **kwargs)

    return call
