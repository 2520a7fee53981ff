"""Errors for packages that a command needs but that are not installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from zero_sim.errors import EnvironmentProblem


@contextlib.contextmanager
def packages_needed() -> Iterator[None]:
    """Turn a failed import of a missing package into an `EnvironmentProblem`."""
    try:
        yield
    except ModuleNotFoundError as error:
        # If our own module is missing, this is a bug.
        if (error.name or "").partition(".")[0] == "zero_sim":
            raise
        raise EnvironmentProblem(
            f"expected the package {error.name!r}, which is not installed. Try `zero-sim doctor`."
        ) from None
