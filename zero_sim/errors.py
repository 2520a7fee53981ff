"""The errors of zero_sim: one small tree, each with the exit status that the command line gives it.

Every message follows one pattern: what was expected, what came, where, and what to try.
A mistake of the user is never an `assert`; an `assert` is a mistake of ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zero_sim.untrusted import clipped, printable


class ZeroSimError(Exception):
    """Root of every error that zero_sim raises on purpose."""

    exit_status = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*(clipped(arg) if isinstance(arg, str) else arg for arg in args))

    @property
    def report(self) -> str:
        """Text for a reader who gets no traceback from Python."""
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without __init__, whose arguments are other ones than the message.
        return _copied, (type(self), *self.args), self.__dict__


def _copied(kind: type[ZeroSimError], *args: object) -> ZeroSimError:
    return kind.__new__(kind, *args)


class UsageError(ZeroSimError, ValueError):
    """The caller asked for something that cannot be: a bad scenario, argument, layout or model."""

    exit_status = 2


class ProtocolError(UsageError):
    """A target or its engine does not keep the protocol that `zero_sim.targets` describes."""


class UntrainableError(UsageError):
    """The reference cannot train a case either, so that nothing is said about the system."""


class UnsupportedByFloat64(ZeroSimError):
    """A script uses a float's own bits, so it cannot be run in float64."""

    def __init__(self, use: str) -> None:
        super().__init__(f"expected uses of floats that work in any dtype, got {use}.")


class EnvironmentProblem(ZeroSimError):
    """This machine or installation cannot run what was asked; the request itself is sound."""

    exit_status = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing wrong with a scenario, or with another file that a person wrote."""

    path: str
    """Dotted path of the field, such as `world.size`; empty for the file as a whole."""
    message: str
    """What was expected and what came."""
    suggestion: str = ""
    """What to try; empty when the message already says it."""

    def __post_init__(self) -> None:
        for name in ("path", "message", "suggestion"):
            object.__setattr__(self, name, clipped(getattr(self, name)))

    def __str__(self) -> str:
        where = self.path or "(file)"
        hint = f" {self.suggestion}" if self.suggestion else ""
        return printable(f"{where}: {self.message}{hint}")


class ScenarioError(UsageError):
    """A scenario, or a file beside it, is not valid; carries every problem, not just the first."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems: Sequence[Problem] = tuple(problems)
        count = len(self.problems)
        head = f"{printable(source)}: {count} problem{'s' if count != 1 else ''}"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))


class LayoutError(UsageError):
    """Flat offsets, buckets or shards were asked for that cannot exist."""


class ModelError(UsageError):
    """The model cannot be trained by the engine: no params, two devices, an unsupported dtype."""


class CheckpointError(UsageError):
    """A checkpoint cannot be saved or loaded; whatever was there before is as it was."""


class BundleError(UsageError):
    """A bundle is not there, is not whole, or was written by something else."""


class MutantError(ZeroSimError):
    """A seeded fault no longer fits the code that it was written against."""
