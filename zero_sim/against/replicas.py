"""Compares tensors that should be replicas among the ranks of one run, as forwards use them.

Params of DistributedDataParallel, buffers that it broadcasts, and DTensors with replicated
placements are declared to be replicas. Other tensors of equal name and shape are only suspected to
be: experts and personal layers may differ rightly.

[Note: the index of a value]
Ranks reach the same forward at different times, and may call different numbers of forwards. So the
values compared are those of the first forward after the same number of optimizer steps on the
tensor itself. Without an optimizer, forwards whose backward reduces gradients are counted instead.
"""

from __future__ import annotations

import fnmatch
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

KEPT_BYTES = 1 << 30
"""Memory of values that wait for other ranks. Beyond it the oldest are dropped, uncompared."""


class ReplicaKey(NamedTuple):
    """A tensor that several ranks have."""

    declared: str
    """What declares it to be a replica, such as `DistributedDataParallel`; empty for nothing."""
    name: str
    shape: tuple[int, ...]
    place: tuple[object, ...] = ()
    """World ranks of its group or mesh, and coordinates on mesh dimensions that shard it."""


class ValueIndex(NamedTuple):
    """When a value was used; see [Note: the index of a value]."""

    steps: int
    """Optimizer steps on the tensor."""
    forwards: int = 0
    """Forwards that reduce gradients, if no optimizer has stepped on the tensor."""

    @property
    def text(self) -> str:
        """The time in words."""
        if self.forwards > 1:
            return f"as forward {self.forwards} used it"
        return f"as the first forward{f' after step {self.steps}' if self.steps else ''} used it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """The first difference between two ranks' values of one tensor."""

    name: str
    declared: str
    """What declares it to be a replica; empty for nothing."""
    excuse: str
    """Why it may differ rightly; empty for a finding."""
    when: str
    steps: int
    """Optimizer steps on the tensor before it."""
    ranks: tuple[int, int]
    """The first two ranks that were found to differ, the lower first."""
    differ_count: int
    elems: int
    element: int
    """The first flat element that differs."""
    values: tuple[float, float]
    """The element's values on the two ranks."""

    @property
    def text(self) -> str:
        """The difference in words."""
        of = f" of {self.declared}" if self.declared else ""
        one, other = self.ranks
        return (
            f"{self.name}{of}, {self.when}\n"
            f"  {self.differ_count:,} of {self.elems:,} elements differ; element {self.element}: "
            f"rank {one} has {self.values[0]:.9g}, rank {other} has {self.values[1]:.9g}"
        )


@dataclass(slots=True)
class _Entry:
    """A value that waits for other ranks."""

    rank: int
    values: Tensor
    excuse: str
    ranks: set[int]


class ReplicaCheck:
    """Compares the tensors of all ranks of one run.

    Args:
        world_size: Number of ranks.
        allowed: Patterns of names that may differ, as of `fnmatch`.
    """

    def __init__(self, *, world_size: int, allowed: Sequence[str] = ()) -> None:
        self.world_size = world_size
        self.findings: list[Drift] = []
        """Declared replicas that differ, in the order in which they were found."""
        self.warnings: list[Drift] = []
        """Tensors that drift apart, and may do so rightly."""
        self.compared: set[ReplicaKey] = set()
        """Declared replicas that were equal on all their ranks whenever they were compared."""
        self._allowed = tuple(allowed)
        self._agreed: set[ReplicaKey] = set()
        self._done: set[ReplicaKey] = set()
        self._entries: OrderedDict[tuple[ReplicaKey, ValueIndex], _Entry] = OrderedDict()
        self._bytes = 0

    def compare(
        self,
        rank: int,
        key: ReplicaKey,
        index: ValueIndex,
        tensor: Tensor,
        *,
        count: int,
        excuse: str,
    ) -> None:
        """Compare a rank's value with that of the first rank that had it.

        Args:
            rank: World rank.
            key: The tensor.
            index: When it is used.
            tensor: Its value.
            count: Number of ranks that have it.
            excuse: Why it may differ from other ranks' rightly; empty for no reason.
        """
        if key in self._done:
            return
        entry = self._entries.get((key, index))
        if entry is None:
            self._keep(key, index, _Entry(rank, tensor.clone(), excuse, {rank}))
            return
        entry.ranks.add(rank)
        if not _same(entry.values, tensor):
            self._done.add(key)
            self.compared.discard(key)
            if key.declared or key in self._agreed:
                # One rank that reduced gradients shows that the step was to be common.
                self._differ(rank, key, index, tensor, entry, excuse=entry.excuse and excuse)
        elif len(entry.ranks) == count:
            if key.declared:
                self.compared.add(key)
            # Zeros and ones are equal on ranks that have different shards, too.
            elif key not in self._agreed and not _is_constant(tensor):
                self._agreed.add(key)
            self._drop((key, index))

    def _keep(self, key: ReplicaKey, index: ValueIndex, entry: _Entry) -> None:
        self._entries[key, index] = entry
        self._bytes += entry.values.nbytes
        while self._bytes > KEPT_BYTES and len(self._entries) > 1:
            self._drop(next(iter(self._entries)))

    def _drop(self, place: tuple[ReplicaKey, ValueIndex]) -> None:
        self._bytes -= self._entries.pop(place).values.nbytes

    def _differ(
        self,
        rank: int,
        key: ReplicaKey,
        index: ValueIndex,
        tensor: Tensor,
        entry: _Entry,
        *,
        excuse: str,
    ) -> None:
        if any(fnmatch.fnmatchcase(key.name, pattern) for pattern in self._allowed):
            return
        one, other = entry.values.reshape(-1), tensor.detach().reshape(-1)
        differs = (one != other) & ~(one.isnan() & other.isnan())
        element = int(differs.nonzero()[0])
        if not key.declared:
            excuse = "nothing declares it to be a replica"
        (low, of_low), (high, of_high) = sorted(
            ((entry.rank, _number(one[element])), (rank, _number(other[element])))
        )
        drift = Drift(
            name=key.name,
            declared=key.declared,
            excuse=excuse,
            when=index.text,
            steps=index.steps,
            ranks=(low, high),
            differ_count=int(differs.sum()),
            elems=one.numel(),
            element=element,
            values=(of_low, of_high),
        )
        (self.warnings if excuse else self.findings).append(drift)

    @property
    def finding(self) -> str:
        """The finding in words; empty for none."""
        if not self.findings:
            return ""
        first, *others = self.findings
        lines = [f"replicas differ: {first.text}", *_listed(others)]
        lines.append(
            "  Let all ranks step on the same gradients and params. If they differ on purpose, "
            f"name them: --allow-drift '{first.name}'."
        )
        return "\n".join(lines)

    @property
    def warning(self) -> str:
        """The tensors that drift apart and may do so rightly, in words; empty for none."""
        if not self.warnings:
            return ""
        first, *others = self.warnings
        lines = [f"equal on all ranks at first, then not: {first.text}", *_listed(others)]
        lines.append(
            f"  This may be right, since {first.excuse}. Then name it: --allow-drift "
            f"'{first.name}'."
        )
        return "\n".join(lines)

    @property
    def notes(self) -> tuple[str, ...]:
        """The warning in one line, if there is one."""
        lines = [line.strip().removesuffix(".") for line in self.warning.splitlines()]
        return (". ".join(lines) + ".",) if lines else ()


def _listed(others: Sequence[Drift]) -> list[str]:
    if not others:
        return []
    more = f", and {len(others) - 3} more" if len(others) > 3 else ""
    return [f"  so do {', '.join(each.name for each in others[:3])}{more}"]


def _same(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _is_constant(tensor: Tensor) -> bool:
    return not tensor.numel() or bool((tensor == tensor.reshape(-1)[0]).all())


def _number(element: Tensor) -> float:
    return element.abs().item() if element.is_complex() else float(element.item())
