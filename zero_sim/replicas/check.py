"""Comparison of tensors that should be replicas between ranks, when forwards use them.

DistributedDataParallel's params, the buffers that it broadcasts, and DTensors with replicated
placements are declared replicas. Other tensors with equal name and shape may be replicas or not:
experts and personal layers differ in a correct script.

[Note: the index of a value]
Ranks reach the same forward at different times, and may call different numbers of forwards. So
values are compared in the first forward after the same number of optimizer steps on the tensor. If
there is no optimizer, forwards whose backward reduces gradients are counted instead.
"""

from __future__ import annotations

import fnmatch
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zero_sim.findings.compare import Difference, find_difference

KEPT_BYTES = 1 << 30
"""Memory limit for values that wait for other ranks. The oldest values are dropped, uncompared."""


class ReplicaKey(NamedTuple):
    """A tensor that several ranks have."""

    declared: str
    """Source of its declaration as a replica, such as `DistributedDataParallel`; "" if none."""
    name: str
    shape: tuple[int, ...]
    place: tuple[object, ...] = ()
    """World ranks of its group or mesh, and the coordinates in mesh dimensions that shard it."""


class ValueIndex(NamedTuple):
    """Time at which a value was used; see [Note: the index of a value]."""

    steps: int
    """Optimizer steps on the tensor."""
    forwards: int = 0
    """Forwards that reduce gradients, if no optimizer has stepped the tensor."""

    @property
    def text(self) -> str:
        """Description for messages."""
        if self.forwards > 1:
            return f"as forward {self.forwards} used it"
        return f"as the first forward{f' after step {self.steps}' if self.steps else ''} used it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """The first difference between two ranks' values of a tensor."""

    key: ReplicaKey
    index: ValueIndex
    excuse: str
    """Reason why a correct script may have this difference; "" for a finding."""
    ranks: tuple[int, int]
    """The first two ranks found to differ, the lower rank first."""
    difference: Difference
    """The difference. The lower rank has the expected values."""

    @property
    def text(self) -> str:
        """Description for messages."""
        of = f" of {self.key.declared}" if self.key.declared else ""
        (one, other), found = self.ranks, self.difference
        return (
            f"{self.key.name}{of}, {self.index.text}\n"
            f"  {found.differ_count:,} of {found.compared_count:,} elements differ; element "
            f"{found.first}: rank {one} has {found.expected:.9g}, rank {other} has {found.got:.9g}"
        )


@dataclass(slots=True)
class _Entry:
    rank: int
    values: Tensor
    excuse: str
    ranks: set[int]


class ReplicaCheck:
    """Comparison of tensors between all ranks in a run.

    Args:
        allowed: `fnmatch` patterns for names of tensors that may differ.
    """

    def __init__(self, *, allowed: Sequence[str] = ()) -> None:
        self.findings: list[Drift] = []
        """Declared replicas that differ, in the order found."""
        self.warnings: list[Drift] = []
        """Tensors that drift apart, as some do in correct scripts."""
        self.compared: set[ReplicaKey] = set()
        """Declared replicas that were always equal on all their ranks."""
        self._allowed = tuple(allowed)
        # Undeclared tensors, equal on all ranks at least once.
        self._agreed: set[ReplicaKey] = set()
        # Tensors found to differ. They are not compared again.
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
        """Compare a value with the first rank's value at this index.

        `count` is the number of ranks with this tensor. `excuse` is a reason why they may differ in
        a correct script; "" if there is none.
        """
        if key in self._done:
            return
        if tensor.is_complex():
            # [..., 2]: real and imaginary parts compare as floats.
            tensor = torch.view_as_real(tensor.resolve_conj())
        entry = self._entries.get((key, index))
        if entry is None:
            # Clone the value, because the next step changes it in place.
            self._keep(key, index, _Entry(rank, tensor.clone(), excuse, {rank}))
            return
        entry.ranks.add(rank)
        # In rank order, so that reports do not depend on the schedule.
        (low, values), (high, others) = sorted(
            ((entry.rank, entry.values), (rank, tensor)), key=lambda each: each[0]
        )
        difference = find_difference(values, others)
        if difference is not None:
            self._done.add(key)
            self.compared.discard(key)
            # Also compare allowed tensors, because they must not count as equal.
            is_allowed = any(fnmatch.fnmatchcase(key.name, pattern) for pattern in self._allowed)
            # If an undeclared tensor was never equal, it is no replica: each rank drew its own.
            if is_allowed or not (key.declared or key in self._agreed):
                return
            # If any rank reduced gradients, all ranks were meant to take the same step.
            excuse = entry.excuse and excuse
            if not key.declared:
                excuse = "nothing declares it to be a replica"
            drift = Drift(
                key=key, index=index, excuse=excuse, ranks=(low, high), difference=difference
            )
            (self.warnings if excuse else self.findings).append(drift)
        elif len(entry.ranks) == count:
            if key.declared:
                self.compared.add(key)
            # Constant tensors, such as zeros, are also equal if ranks have different shards.
            elif key not in self._agreed and bool((tensor != tensor.reshape(-1)[0]).any()):
                self._agreed.add(key)
            self._drop((key, index))

    def _keep(self, key: ReplicaKey, index: ValueIndex, entry: _Entry) -> None:
        self._entries[key, index] = entry
        self._bytes += entry.values.nbytes
        while self._bytes > KEPT_BYTES and len(self._entries) > 1:
            # Always keep the newest entry, so that even a tensor above the limit is compared.
            self._drop(next(iter(self._entries)))

    def _drop(self, place: tuple[ReplicaKey, ValueIndex]) -> None:
        self._bytes -= self._entries.pop(place).values.nbytes

    @property
    def finding(self) -> str:
        """Description of the findings; "" if there are none."""
        return _in_words(
            self.findings,
            "replicas differ",
            "Let all ranks step on the same gradients and params. If they differ on purpose, name "
            "them",
        )

    @property
    def warning(self) -> str:
        """Description of the warnings; "" if there are none."""
        excuse = self.warnings[0].excuse if self.warnings else ""
        return _in_words(
            self.warnings,
            "equal on all ranks at first, then not",
            f"This alone is no error, because {excuse}. If ranks are meant to differ, name it",
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """The warning in a single line, or no line."""
        lines = [line.strip().removesuffix(".") for line in self.warning.splitlines()]
        return (". ".join(lines) + ".",) if lines else ()


def _in_words(drifts: Sequence[Drift], head: str, remedy: str) -> str:
    if not drifts:
        return ""
    first, *others = drifts
    lines = [f"{head}: {first.text}"]
    if others:
        more = f", and {len(others) - 3} more" if len(others) > 3 else ""
        lines.append(f"  so do {', '.join(each.key.name for each in others[:3])}{more}")
    return "\n".join([*lines, f"  {remedy}: --allow-drift '{first.key.name}'."])
