"""Packages that a command needs and that may not be installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from zero_sim.errors import EnvironmentProblem


@contextlib.contextmanager
def packages_needed() -> Iterator[None]:
    """Around imports: a package that is missing is a problem of the machine."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "zero_sim":
            raise
        raise EnvironmentProblem(
            f"expected the package {error.name!r}, which is not installed. Try `zero-sim doctor`."
        ) from None
