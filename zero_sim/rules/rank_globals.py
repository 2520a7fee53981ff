"""Names under which a library keeps rank-local data, found by running two ranks.

Every global, class attribute and mutable default argument in the packages is swapped when the baton
moves. So libraries that expect one rank per process can run, and names that a rank changes have
rank-local data. A first run, in which each rank imports the packages itself, finds the modules.
This run is needed because names must be copied before a rank changes them, so all modules must be
imported before ranks start. Objects that are changed in place are missed, except for Python's
containers.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zero_sim.backends.worlds import WorldPool
from zero_sim.findings.records import CaseResult
from zero_sim.run.rank_local import Own, OwnState, RankLocalState
from zero_sim.run.runner import judge_case
from zero_sim.run.simulated import Simulated
from zero_sim.scenario.spec import Scenario
from zero_sim.script.rank_local_names import OwnNames, copied, default_positions, is_data
from zero_sim.targets import Target
from zero_sim.targets.rank_local import RankLocal, prepare, rank_local_of

_ROUNDS_MAX = 4
"""Most runs per case. Each run may import further modules."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGlobals:
    """Names with rank-local data in a library."""

    names: tuple[str, ...]
    """Names for `RankLocal.names`."""
    packages: tuple[str, ...]
    """Top-level packages searched."""
    looked_at: int
    """Number of names swapped and compared."""
    results: Sequence[CaseResult]
    """Results of the cases, run again with only the changed names swapped."""


def find_rank_globals(
    target: Target, scenarios: Sequence[Scenario], *, packages: Collection[str]
) -> RankGlobals:
    """Run cases with all names swapped until nothing new is imported, and return changed names.

    Args:
        target: The system under test.
        scenarios: Cases that the target supports, on two ranks.
        packages: Top-level packages to search.
    """
    prepare(target)
    declared = rank_local_of(target) or RankLocal()
    changed: dict[str, None] = {}
    names: list[str] = []
    results: list[CaseResult] = []
    with WorldPool() as worlds:
        for scenario in scenarios:
            ranks = scenario.world.size
            # All names in the packages, instead of the declared names.
            copies = replace(declared, names=(), packages=tuple(packages))
            imported = _ImportedModules(copies)
            _judge(scenario, target, worlds, RankLocalState(copies, ranks_max=ranks), imported)
            # Import in this process, so that all modules' names exist before the first rank runs.
            for name in imported.names:
                importlib.import_module(name)
            for _ in range(_ROUNDS_MAX):
                names = list(_data_names(packages))
                own = _ComparedNames(names)
                state = RankLocalState(replace(declared, names=()), ranks_max=ranks)
                _judge(scenario, target, worlds, state, own)
                changed.update(dict.fromkeys(own.changed))
                # No new names, so nothing new was imported.
                if len(list(_data_names(packages))) == len(names):
                    break
        # Run again with only these names swapped, because they must suffice.
        kept = tuple(sorted(changed))
        for scenario in scenarios:
            state = RankLocalState(replace(declared, names=kept), ranks_max=scenario.world.size)
            backend = Simulated(worlds=worlds, target=target, own=state)
            results.append(judge_case(scenario, backend))
    return RankGlobals(
        names=kept,
        packages=tuple(packages),
        looked_at=len(names),
        results=results,
    )


def _judge(
    scenario: Scenario, target: Target, worlds: WorldPool, state: RankLocalState, own: Own
) -> None:
    state.own = own
    judge_case(scenario, Simulated(worlds=worlds, target=target, own=state))


class _ImportedModules(OwnState):
    """Each rank imports packages itself; module names are recorded."""

    def __init__(self, copies: RankLocal) -> None:
        super().__init__(copies)
        self._packages = frozenset(copies.packages)
        self.names: dict[str, None] = {}

    def take_out(self, owner: int) -> None:
        for name in sys.modules:
            if name.partition(".")[0] in self._packages:
                self.names[name] = None
        super().take_out(owner)


class _ComparedNames:
    """All names are swapped; names changed by a rank are recorded."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._own = OwnNames(names)
        self._given: dict[int, list[Any]] = {}
        self.changed: dict[str, None] = {}

    @property
    def skipped(self) -> Mapping[str, str]:
        return self._own.skipped

    def begin(self, caller: int) -> None:
        self._own.begin(caller)
        self._caller = caller
        self._given.clear()

    def take_out(self, owner: int) -> None:
        self._own.take_out(owner)
        # The caller is not a rank.
        if owner == self._caller:
            return
        saved = self._own.saved(owner)
        for name, given, value in zip(self._names, self._own.caller, saved, strict=True):
            if not _same(given, value):
                self.changed[name] = None

    def put_in_place(self, owner: int, *, previous: int) -> None:
        self._own.put_in_place(owner)

    def forget(self) -> None:
        self._own.forget()


def _same(given: Any, value: Any) -> bool:
    """Return True if a value still equals the copy given to the rank."""
    if given is value:
        return True
    if type(given) is not type(value) or copied(given) is given:
        # Numbers and strings compare by value, all other objects by identity.
        return type(given) is type(value) and type(value) in _PLAIN and given == value
    if len(given) != len(value):
        return False
    if isinstance(value, dict):
        return all(key in value and _same(each, value[key]) for key, each in given.items())
    if isinstance(value, set):
        return given == value
    return all(_same(one, other) for one, other in zip(given, value, strict=True))


_PLAIN = (bool, int, float, complex, str, bytes)


def _data_names(packages: Collection[str]) -> Iterator[str]:
    """Yield names in the packages' modules that can hold data."""
    wanted = frozenset(packages)
    for module_name, module in list(sys.modules.items()):
        # Entries in sys.modules need not be modules.
        if module_name.partition(".")[0] not in wanted or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            # Only where it is defined, not where it is imported.
            if isinstance(value, type) and value.__module__ == module_name:
                yield from _names_of_class(module_name, key, value)
            elif inspect.isfunction(value) and value.__module__ == module_name:
                yield from _defaults(module_name, key, value)
            elif is_data(key, value):
                yield f"{module_name}:{key}"


def _names_of_class(module_name: str, path: str, made: type) -> Iterator[str]:
    for key, value in list(vars(made).items()):
        # Static and class methods wrap their function.
        function = getattr(value, "__func__", value)
        if inspect.isfunction(function):
            yield from _defaults(module_name, f"{path}.{key}", function)
        elif _is_kept(made, key, value):
            yield f"{module_name}:{path}.{key}"


def _is_kept(made: type, key: str, value: object) -> bool:
    # Enum members are fixed, and descriptors store values elsewhere.
    is_fixed = hasattr(made, "__members__") or hasattr(type(value), "__get__")
    return is_data(key, value) and not is_fixed


def _defaults(module_name: str, path: str, function: types.FunctionType) -> Iterator[str]:
    for argument, position in default_positions(function).items():
        default = (function.__defaults__ or ())[position]
        # Immutable defaults cannot hold state.
        if copied(default) is not default and not isinstance(default, tuple):
            yield f"{module_name}:{path}({argument})"
