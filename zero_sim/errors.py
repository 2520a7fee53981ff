"""Errors of zero_sim: a small tree of classes, each with its exit status on the command line.

Each message follows one pattern: expected, got, where, remedy. User mistakes raise these errors. A
failing `assert` is a bug in zero_sim.
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
        # Messages contain values from users' files, which may have any length.
        super().__init__(*(clipped(arg) if isinstance(arg, str) else arg for arg in args))

    @property
    def report(self) -> str:
        """Text for a reader who sees no traceback."""
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process boundaries, so they must be picklable. By __new__, because __init__
        # may take other arguments than the message.
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
    """A script that uses a float's bits, so it cannot run in float64."""

    def __init__(self, use: str) -> None:
        super().__init__(f"expected uses of floats that work in any dtype, got {use}.")


class EnvironmentProblem(ZeroSimError):
    """A valid request that this machine or installation cannot fulfil."""

    exit_status = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A mistake in a scenario, or in another file written by a person."""

    path: str
    """Dotted field path, such as `world.size`; empty for the whole file."""
    message: str
    """Expected and got values."""
    suggestion: str = ""
    """Remedy; empty if the message contains it."""

    def __post_init__(self) -> None:
        for name in ("path", "message", "suggestion"):
            # The only way in which a frozen dataclass can change its fields.
            object.__setattr__(self, name, clipped(getattr(self, name)))

    def __str__(self) -> str:
        where = self.path or "(file)"
        hint = f" {self.suggestion}" if self.suggestion else ""
        return printable(f"{where}: {self.message}{hint}")


class ScenarioError(UsageError):
    """An invalid scenario, or a file beside it, with all of its problems."""

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
    """A seeded fault that no longer fits its code."""
