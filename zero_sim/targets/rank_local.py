"""Declarations of a library's per-process state that each simulated rank needs for itself.

[Note: rank-local state]
A library that expects one rank per process keeps the state of that rank in globals of its modules,
in class attributes, or in mutable default arguments. In the simulated world all ranks are threads
of one process. So a target declares these names: their values move with the baton, and a rank
begins every program with a copy of the values before it. Or it declares packages that each rank
imports for itself, which needs no list of names and costs an import per rank and program. On real
processes these declarations have no effect.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from dataclasses import dataclass

from zero_sim.errors import EnvironmentProblem, ProtocolError, UsageError
from zero_sim.targets.answers import shown
from zero_sim.targets.protocol import Target

_NAME = re.compile(r"[A-Za-z_][\w.]*:([A-Za-z_][\w.]*(\([A-Za-z_]\w*\))?|\*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLocal:
    """State of a process that each simulated rank has for itself: `rank_local` of a target.

    Example:
        >>> RankLocal(names=("lib.comm:GROUP", "lib.engine:Engine.count")).cuda_is_cpu
        False

    Raises:
        UsageError: A name has another form.
    """

    names: tuple[str, ...] = ()
    """Names: `module:name` for a global, `module:Class.attribute`, `module:function(argument)` for
    a mutable default argument, or `module:*` for all globals of a module except modules, classes
    and functions. The modules are imported before the first rank begins. A name that the installed
    version of a library lacks is skipped, with a note in the result."""
    packages: tuple[str, ...] = ()
    """Top-level packages that each rank imports for itself in every program."""
    cuda_is_cpu: bool = False
    """True if ranks find CUDA devices that compute on the CPU, as with `zero-sim torchrun
    --cuda-is-cpu`. For libraries that call `torch.cuda` on every machine."""

    def __post_init__(self) -> None:
        for field in ("names", "packages"):
            values: object = getattr(self, field)
            # A bare string is iterable, and would be read letter by letter.
            if not isinstance(values, tuple):
                raise UsageError(
                    f"expected RankLocal.{field} to be a tuple, got {values!r}. Try ({values!r},)."
                )
        for name in self.names:
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise UsageError(
                    f"expected an entry of RankLocal.names such as 'package.module:GLOBAL', got "
                    f"{name!r}. Try 'module:name', 'module:Class.attribute' or "
                    "'module:function(argument)'."
                )
        for name in self.packages:
            if not isinstance(name, str) or not name.isidentifier():
                raise UsageError(
                    f"expected an entry of RankLocal.packages to be a top-level package, got "
                    f"{name!r}. Use the part before its first dot."
                )


def rank_local_of(target: Target) -> RankLocal | None:
    """Return the rank-local state that a target declares; None if it declares none.

    Raises:
        ProtocolError: `rank_local` is something else.
    """
    declared: object = getattr(target, "rank_local", None)
    if declared is None or isinstance(declared, RankLocal):
        return declared
    raise ProtocolError(
        f"expected 'rank_local' of target {target.name!r} to be zero_sim.targets.RankLocal or "
        f"None, got {shown(declared)}."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """The package under test of a shipped target: its attribute `library`.

    Example:
        >>> Library(package="deepspeed", extra="deepspeed", judged="deepspeed==0.19.8").environment
        ()
    """

    package: str
    """Name to import, such as `deepspeed`."""
    extra: str
    """Extra that installs the package, as in `zero-sim[extra]`."""
    judged: str = ""
    """Distribution and version whose rules the target declares, such as `deepspeed==0.19.8`."""
    # Read when the package is imported, so they are set before.
    environment: tuple[tuple[str, str], ...] = ()
    """Environment variables and their values, set if they are not set yet."""


def why_missing(target: Target) -> str:
    """Return a message if the package of a target is not installed; empty if it is."""
    library: object = getattr(target, "library", None)
    if not isinstance(library, Library) or _is_installed(library.package):
        return ""
    return (
        f"target {target.name!r} needs the package {library.package!r}, which is not installed. "
        f'Try `pip install "zero-sim[{library.extra}]"`.'
    )


def prepare(target: Target) -> None:
    """Check that a target's package is installed, and set its environment variables.

    Raises:
        EnvironmentProblem: It is not installed. The message names its extra.
    """
    why = why_missing(target)
    if why:
        raise EnvironmentProblem(f"expected an installed package, got none: {why}")
    library: object = getattr(target, "library", None)
    if isinstance(library, Library):
        # The user's own values have precedence.
        for name, value in library.environment:
            os.environ.setdefault(name, value)


def why_not_judged(target: Target) -> str:
    """Return a note if the installed version of a library may have other rules; else empty."""
    library: object = getattr(target, "library", None)
    if not isinstance(library, Library) or not library.judged:
        return ""
    name, _, judged = library.judged.partition("==")
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        installed = "of an unknown version"
    # A local version such as 0.19.8+cpu has the same rules.
    if installed.partition("+")[0] == judged:
        return ""
    return (
        f"{name} {installed} is installed; target {target.name!r} declares the rules of "
        f"{name} {judged}, so this may be a change between the two"
    )


def _is_installed(package: str) -> bool:
    # Without importing the package, which may take seconds and needs its environment first.
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
