"""Packages that a command needs and that may not be installed."""

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
        # One of our own modules is missing, which is a bug.
        if (error.name or "").partition(".")[0] == "zero_sim":
            raise
        raise EnvironmentProblem(
            f"expected the package {error.name!r}, which is not installed. Try `zero-sim doctor`."
        ) from None
