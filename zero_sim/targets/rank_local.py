"""Declarations of what a library keeps once a process and each rank needs for itself.

[Note: rank-local state]
A library that counts on one rank a process keeps what belongs to that rank in globals of its
modules, in attributes of its classes, or in a mutable default argument. In the simulated world all
ranks are threads of one process, so a target says which names these are: they move with the baton,
and a rank begins every program with a copy of what they held before it. Or it says which packages
each rank imports for itself, which needs no list and costs one import a rank and program. On real
processes none of that is needed, and nothing of it is done.
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
    """What of a process each simulated rank has for itself under a target; `rank_local` of it.

    Raises:
        UsageError: A name is none.
    """

    names: tuple[str, ...] = ()
    """`module:name` of a global, `module:Class.attribute`, or `module:function(argument)` of a
    mutable default argument; or `module:*` for all globals of it that are no modules, classes and
    functions. The modules are imported before the first rank begins. A name that the installed
    version of a library lacks is skipped, and a note of the case says so."""
    packages: tuple[str, ...] = ()
    """Top-level packages that each rank imports for itself, in every program anew."""
    cuda_is_cpu: bool = False
    """Whether ranks find GPUs in name that compute on the CPU, as with `zero-sim torchrun
    --cuda-is-cpu`: for a library that calls `torch.cuda` wherever it runs."""

    def __post_init__(self) -> None:
        for field in ("names", "packages"):
            values: object = getattr(self, field)
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
                    f"{name!r}. Try what stands before its first dot."
                )


def rank_local_of(target: Target) -> RankLocal | None:
    """What a target declares of rank-local state; None where it declares nothing.

    Raises:
        ProtocolError: It declares something else.
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
    """The package that a shipped target judges; `library` of it."""

    package: str
    """The module that is imported."""
    extra: str
    """Of `zero-sim[extra]`, which installs it."""
    judged: str = ""
    """Distribution and version whose rules the target declares: `deepspeed==0.19.8`."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that it reads when it is imported, set where nobody has set them."""


def why_missing(target: Target) -> str:
    """Why a target cannot run here, as its package is not installed; empty where it can."""
    library: object = getattr(target, "library", None)
    if not isinstance(library, Library) or _is_installed(library.package):
        return ""
    return (
        f"target {target.name!r} needs the package {library.package!r}, which is not installed. "
        f'Try `pip install "zero-sim[{library.extra}]"`.'
    )


def prepare(target: Target) -> None:
    """Check that the package which a target judges is there, and set what it reads.

    Raises:
        EnvironmentProblem: It is not; names the extra that installs it.
    """
    why = why_missing(target)
    if why:
        raise EnvironmentProblem(f"expected an installed package, got none: {why}")
    library: object = getattr(target, "library", None)
    if isinstance(library, Library):
        for name, value in library.environment:
            os.environ.setdefault(name, value)


def why_not_judged(target: Target) -> str:
    """Name the installed version of a library if its rules may differ; empty for the judged one.

    Args:
        target: The system under test.
    """
    library: object = getattr(target, "library", None)
    if not isinstance(library, Library) or not library.judged:
        return ""
    name, _, judged = library.judged.partition("==")
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        installed = "of an unknown version"
    # Builds of one version, such as 0.19.8+cpu, compute alike.
    if installed.partition("+")[0] == judged:
        return ""
    return (
        f"{name} {installed} is installed; target {target.name!r} declares the rules of "
        f"{name} {judged}, so this may be a change between the two"
    )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
