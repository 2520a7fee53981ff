"""Custom operators that all ranks define, although names are unique in a process.

If a name is defined again, torch replaces the first definition, and callers of the first definition
crash. So the first rank's definition stays, and calls the running rank's function.
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

# By qualified name. Kept for the process, because an operator outlives the run that defined it.
_definitions: dict[str, Any] = {}
# Functions by qualified name, then by thread of the rank.
_functions: dict[str, dict[int, Callable[..., Any]]] = {}


@contextlib.contextmanager
def operators_of_ranks() -> Iterator[None]:
    """Let all ranks define an operator under the same name with `torch.library.custom_op`."""
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
                # From the function itself, because its annotations may use its module's globals.
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
        # Threads of an earlier run are gone, and new threads may get the same idents.
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
                    "All simulated ranks share a process, which can define a library only once. "
                    "Use torch.library.custom_op, which each rank may call."
                )
            raise

    return init


def _dispatched(
    first: Callable[..., Any], functions: dict[int, Callable[..., Any]]
) -> Callable[..., Any]:
    @functools.wraps(first)
    def call(*args: Any, **kwargs: Any) -> Any:
        # If ranks share the module, only the rank that imported it defined the operator.
        function = functions.get(threading.get_ident()) or next(iter(functions.values()), first)
        return function(*args, **kwargs)

    return call
