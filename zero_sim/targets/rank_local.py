"""Declarations of per-process state in a library, which each simulated rank needs for itself.

[Note: rank-local state]
A library that expects a process for each rank keeps this rank's state in module globals, class
attributes or mutable default arguments. But simulated ranks are threads of the same process. So a
target declares these names. Their values then move with the baton, and each rank begins a program
with a copy of the values before it. Alternatively, a target declares packages that each rank
imports for itself. This needs no list of names, but costs an import per rank and program. These
declarations have no effect on real processes.
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
    """Per-process state of which each simulated rank has its own: a target's `rank_local`.

    Example:
        >>> RankLocal(names=("lib.comm:GROUP", "lib.engine:Engine.count")).cuda_is_cpu
        False

    Raises:
        UsageError: A name has another form.
    """

    names: tuple[str, ...] = ()
    """Names: `module:name` for a global, `module:Class.attribute`, `module:function(argument)` for
    a mutable default argument, or `module:*` for all of a module's globals except modules, classes
    and functions. The modules are imported before the first rank begins. If the installed library
    lacks a name, it is skipped, and the result has a note."""
    packages: tuple[str, ...] = ()
    """Top-level packages that each rank imports for itself in every program."""
    cuda_is_cpu: bool = False
    """True to show ranks CUDA devices that compute on the CPU, as `zero-sim torchrun --cuda-is-cpu`
    does. Use it for libraries that call `torch.cuda` on every machine."""

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
                    f"{name!r}. Use the part before the first dot."
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
    """The package that a shipped target tests: its attribute `library`.

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
    # Set before the import, because the package reads them then.
    environment: tuple[tuple[str, str], ...] = ()
    """Environment variables with values, set only if the user has not set them."""


def why_missing(target: Target) -> str:
    """Return a message if a target's package is not installed; "" if it is."""
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
        EnvironmentProblem: It is not installed. The message names the extra.
    """
    why = why_missing(target)
    if why:
        raise EnvironmentProblem(f"expected an installed package, got none: {why}")
    library: object = getattr(target, "library", None)
    if isinstance(library, Library):
        # The user's values take precedence.
        for name, value in library.environment:
            os.environ.setdefault(name, value)


def why_not_judged(target: Target) -> str:
    """Return a note if the installed version of a library may have other rules; else ""."""
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
    # Do not import the package: this may take seconds, and its environment must be set first.
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
