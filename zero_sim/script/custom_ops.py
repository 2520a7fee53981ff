"""Operators that each rank defines under the same name, while a process can have only one.

If a name is defined again, torch replaces the first definition, whose callers then crash. So the
first rank's definition stays, and calls the function of the rank that runs.
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

# By qualified name, because an operator outlives the run that defined it.
_definitions: dict[str, Any] = {}
# By qualified name, then by thread: the function of each rank.
_functions: dict[str, dict[int, Callable[..., Any]]] = {}


@contextlib.contextmanager
def operators_of_ranks() -> Iterator[None]:
    """Let several ranks define an operator of one name with `torch.library.custom_op`."""
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
                # From the function itself, because its annotations may name globals of its module.
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
        # Threads of an earlier run are gone, and new ones may get their idents.
        for functions in _functions.values():
            functions.clear()
        yield


def _explained() -> Callable[..., None]:
    original = torch.library.Library.__init__

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        try:
            # torch allows one Library of kind DEF per namespace and process.
            original(*args, **kwargs)
        except RuntimeError as error:
            if rank_state.join is not None:
                error.add_note(
                    "All ranks of the simulated world are one process, which can define a "
                    "library only once. Use torch.library.custom_op, which each rank may call."
                )
            raise

    return init


def _dispatched(
    first: Callable[..., Any], functions: dict[int, Callable[..., Any]]
) -> Callable[..., Any]:
    @functools.wraps(first)
    def call(*args: Any, **kwargs: Any) -> Any:
        # In a module that ranks share, only the rank that imports it first defines the operator.
        function = functions.get(threading.get_ident()) or next(iter(functions.values()), first)
        return function(*args, **kwargs)

    return call
