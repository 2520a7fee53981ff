"""Errors of zero_sim: one small tree, with the exit status of the command line for each.

Each message follows one pattern: expected, got, where, remedy. Mistakes of the user raise these
errors. An `assert` that fails is a bug of zero_sim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zero_sim.untrusted import clipped, printable


class ZeroSimError(Exception):
    """Root of all errors that zero_sim raises on purpose."""

    exit_status = 1

    def __init__(self, *args: object) -> None:
        # Messages contain values of users' files, which may have any length.
        super().__init__(*(clipped(arg) if isinstance(arg, str) else arg for arg in args))

    @property
    def report(self) -> str:
        """Text for a reader who sees no traceback."""
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # By __new__, because the arguments of __init__ differ from the message.
        # Errors cross process boundaries, so they must be picklable.
        return _copied, (type(self), *self.args), self.__dict__


def _copied(kind: type[ZeroSimError], *args: object) -> ZeroSimError:
    return kind.__new__(kind, *args)


class UsageError(ZeroSimError, ValueError):
    """An invalid request: a bad scenario, argument, layout or model."""

    exit_status = 2


class ProtocolError(UsageError):
    """A violation of the protocol in `zero_sim.targets` by a target or its engine."""


class UntrainableError(UsageError):
    """A case that the reference cannot train either, so that the system is not judged."""


class UnsupportedByFloat64(ZeroSimError):
    """A script that uses the bits of a float, so that it cannot run in float64."""

    def __init__(self, use: str) -> None:
        super().__init__(f"expected uses of floats that work in any dtype, got {use}.")


class EnvironmentProblem(ZeroSimError):
    """A valid request that this machine or installation cannot fulfil."""

    exit_status = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A mistake in a scenario, or in another file that a person wrote."""

    path: str
    """Dotted path of the field, such as `world.size`; empty for the file as a whole."""
    message: str
    """Expected and got values."""
    suggestion: str = ""
    """Remedy; empty if the message contains it."""

    def __post_init__(self) -> None:
        for name in ("path", "message", "suggestion"):
            # A frozen dataclass can only change its fields in this way.
            object.__setattr__(self, name, clipped(getattr(self, name)))

    def __str__(self) -> str:
        where = self.path or "(file)"
        hint = f" {self.suggestion}" if self.suggestion else ""
        return printable(f"{where}: {self.message}{hint}")


class ScenarioError(UsageError):
    """An invalid scenario, or a file beside it, with all of its problems, not only the first."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems: Sequence[Problem] = tuple(problems)
        # All problems at once, so that a user need not fix them one by one.
        count = len(self.problems)
        head = f"{printable(source)}: {count} problem{'s' if count != 1 else ''}"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))


class LayoutError(UsageError):
    """A request for flat offsets, buckets or shards that cannot exist."""


class ModelError(UsageError):
    """A model that the engine cannot train: no params, two devices, an unsupported dtype."""


class CheckpointError(UsageError):
    """A checkpoint that cannot be saved or loaded. Existing files are unchanged."""


class BundleError(UsageError):
    """A bundle that is absent, incomplete, or written by another program."""


class MutantError(ZeroSimError):
    """A seeded fault that no longer fits the code it was written for."""
