"""Data rows that a rank's outermost forwards read, and dealing of a run's rows to another run.

A slot is a module's argument, such as `GPT(idx)`. Tensors with gradients or without dimensions
contain no rows.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_sim.errors import UsageError

# 64 bits: among a million rows, the probability of a collision is 3e-8.
_DIGEST_BYTES = 8


class Slot(NamedTuple):
    """An argument that contains rows."""

    module: str
    """Class of the module, or name of the loss function."""
    argument: str
    """The argument's name or position."""

    def __str__(self) -> str:
        return f"{self.module}({self.argument})"


class RowsLack(UsageError):
    """The run whose rows are dealt has read too few rows."""


def _own_rows(step: int, slot: Slot, rows: Tensor) -> Tensor:
    return rows


@dataclass(slots=True)
class RowLog:
    """Rows that a rank read, by step and slot."""

    rank: int = 0
    sharers: set[int] = field(default_factory=set)
    """Ranks with the same forwards: all ranks in the meshes of their DTensors."""
    keeps_values: bool = False
    """True to keep the rows, for dealing."""
    deal: Callable[[int, Slot, Tensor], Tensor] = _own_rows
    """Function from step, slot and the rank's own rows to the rows for a forward."""
    trouble: UsageError | None = None
    """Reason why rows could not be dealt; None if they could."""
    digests: dict[tuple[int, Slot], list[str]] = field(default_factory=lambda: defaultdict(list))
    epochs: dict[int, int] = field(default_factory=dict)
    """Number of DataLoader passes begun before each step; 0 without a DataLoader."""
    values: dict[tuple[int, Slot], list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    evaluations: set[str] = field(default_factory=set)
    """Digests of rows in forwards without gradients."""
    _passes: int = 0

    def begin_pass(self) -> None:
        """Count the start of a pass over a DataLoader."""
        self._passes += 1

    def evaluated(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record the rows of a forward without gradients."""
        for _, tensor in _slots("", args, kwargs):
            self.evaluations.update(_digests(tensor))

    def read(
        self,
        step: int,
        module: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        trains: bool = True,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Record the rows of an outermost forward, and return its arguments with dealt rows.

        `trains` is False for a teacher, which computes without gradients. Its rows are dealt, but
        not compared.
        """
        self.epochs.setdefault(step, self._passes)
        # Positions are also slots: "0", "1", ...
        given = {**{str(index): each for index, each in enumerate(args)}, **kwargs}
        for slot, tensor in _slots(module, args, kwargs):
            try:
                rows = given[slot.argument] = self.deal(step, slot, tensor)
            except UsageError as trouble:
                # Keep the error, because the script may catch it.
                self.trouble = trouble
                raise
            if trains:
                self.digests[step, slot] += _digests(rows)
            if self.keeps_values:
                self.values[step, slot].append(rows.detach().clone())
        values = list(given.values())
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    def until(self, step: int) -> RowLog:
        """Return a log with only the steps before `step`."""
        digests = {key: rows for key, rows in self.digests.items() if key[0] < step}
        return RowLog(
            rank=self.rank, sharers=self.sharers, digests=digests, evaluations=self.evaluations
        )


class Dealer:
    """Dealer of a rank's share of the rows that another run read.

    If a rank would read batches of `b` rows, forward `j` on rank `r` of N gets `b` rows of the
    other run, beginning with row `(j * N + r) * b`. With `splits`, the other run's batch `j` is cut
    into N equal parts, and rank `r` gets part `r`.

    Args:
        source: The other run's log, with values.
        rank: This rank.
        world_size: Number of ranks.
        splits: True to split each batch, for scripts whose batch size per rank cannot be set.
    """

    def __init__(self, source: RowLog, *, rank: int, world_size: int, splits: bool = False) -> None:
        self._values = source.values
        self._rank = rank
        self._world_size = world_size
        self._splits = splits
        self._dealt: Counter[tuple[int, Slot]] = Counter()
        batches: dict[Slot, list[Tensor]] = defaultdict(list)
        for (_, slot), each in source.values.items():
            batches[slot] += each
        # Arguments are no data if they are equal in all forwards, such as masks.
        self._constant = {slot: each[0] for slot, each in batches.items() if _are_constant(each)}

    def deal(self, step: int, slot: Slot, tensor: Tensor) -> Tensor:
        """Return the rows that replace a tensor.

        Raises:
            UsageError: The other run read no rows, or too few, in this step and slot.
        """
        if (step, slot) not in self._values:
            raise UsageError(
                f"expected {slot} in step {step + 1} on one rank too, because its rows are dealt, "
                "got none. Run without --feed."
            )
        if slot in self._constant and torch.equal(self._constant[slot], tensor):
            return tensor
        index = self._dealt[step, slot]
        self._dealt[step, slot] += 1
        deal = self._part if self._splits else self._stretch
        return deal(step, slot, index, tensor.shape[0]).to(tensor.device)

    def _stretch(self, step: int, slot: Slot, index: int, count: int) -> Tensor:
        # [rows of the step, ...], in the order of the other run's forwards.
        rows = torch.cat(self._values[step, slot])
        # Ranks take turns with a batch each.
        start = (index * self._world_size + self._rank) * count
        if rows.shape[0] < start + count:
            raise RowsLack(
                f"expected at least {start + count} rows of {slot} in step {step + 1} on one rank, "
                f"got {rows.shape[0]}. Let one rank read as many rows as all ranks together, with "
                "--arguments-of-one."
            )
        return rows[start : start + count]

    def _part(self, step: int, slot: Slot, index: int, _: int) -> Tensor:
        batches = self._values[step, slot]
        count = batches[index].shape[0] if index < len(batches) else 0
        if not count or count % self._world_size:
            raise UsageError(
                f"expected a batch that {self._world_size} ranks can share in forward "
                f"{index + 1} of {slot} in step {step + 1} on one rank, got {count} rows. Let one "
                "rank read as many rows as all ranks together, with --arguments-of-one."
            )
        return batches[index].chunk(self._world_size)[self._rank]


def _are_constant(batches: Sequence[Tensor]) -> bool:
    return len(batches) > 1 and all(torch.equal(batches[0], each) for each in batches)


def _slots(
    module: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Slot, Tensor]]:
    for key, value in (*enumerate(args), *kwargs.items()):
        if (
            type(value) is Tensor
            and value.dim()
            # A batch is a plain tensor whose first dimension is rows, without an input gradient.
            and value.numel()
            and not value.requires_grad
            and value.layout is torch.strided
            and value.device.type == "cpu"
            and not torch._C._functorch.is_functorch_wrapped_tensor(value)
        ):
            yield Slot(module, str(key)), value


def _digests(tensor: Tensor) -> list[str]:
    rows = tensor.detach().contiguous()
    # In fp64, so that rows have the same digest in any dtype that represents them.
    if rows.dtype.is_floating_point:
        rows = rows.to(torch.float64)
    # [rows, features]: a digest for each row, because batch sizes may differ.
    return [digest_of(row) for row in rows.reshape(rows.shape[0], -1)]


def digest_of(values: Tensor) -> str:
    """Return a hash of a tensor's bytes."""
    # Hash a copy, because FSDP2 must resize the memory, but cannot while numpy refers to it.
    content = values.detach().flatten().clone().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()
