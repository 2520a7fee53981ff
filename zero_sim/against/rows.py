"""Rows of data that a rank's outermost forwards read, and dealing one run's rows to another.

A slot is one argument of one module, such as `GPT(idx)`. Tensors that need gradients, and those
without dimensions, hold no rows.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zero_sim.errors import UsageError

_DIGEST_BYTES = 8


class Slot(NamedTuple):
    """An argument that holds rows."""

    module: str
    """Class of the module, or name of the loss function."""
    argument: str
    """Its name, or its position."""

    def __str__(self) -> str:
        return f"{self.module}({self.argument})"


class RowsRead(Protocol):
    """Receives the arguments of outermost forwards."""

    def read(
        self,
        step: int,
        module: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        trains: bool = True,
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Note the rows; return other arguments if they are to be replaced.

        Args:
            step: Optimizer steps so far.
            module: Class of the module, or name of the loss function.
            args: Arguments by position.
            kwargs: Arguments by name.
            trains: False for a teacher, which computes without gradients: its rows are dealt, and
                not compared.
        """
        ...

    def evaluated(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note rows that a forward without gradients read."""
        ...

    def begin_pass(self) -> None:
        """Note that a pass over a DataLoader begins."""
        ...


@dataclass(slots=True)
class RowLog:
    """Rows that one rank read, by step and slot."""

    rank: int = 0
    sharers: set[int] = field(default_factory=set)
    """Ranks that share this rank's forwards: those of meshes of the DTensors that it uses there."""
    keeps_values: bool = False
    """True to keep the rows themselves, so that they can be dealt."""
    lacks_rows: bool = False
    """True if the run that rows are dealt from read too few."""
    trouble: str = ""
    """Why rows could not be dealt; empty if they could."""
    digests: dict[tuple[int, Slot], list[str]] = field(default_factory=lambda: defaultdict(list))
    epochs: dict[int, int] = field(default_factory=dict)
    """Passes over DataLoaders that had begun in each step; 0 for rows that no DataLoader gave."""
    values: dict[tuple[int, Slot], list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    evaluations: set[str] = field(default_factory=set)
    """Digests of the rows that forwards without gradients read."""
    _passes: int = 0

    @property
    def constant_slots(self) -> frozenset[Slot]:
        """Arguments that are no data, such as a mask: equal in each of several forwards."""
        found: dict[Slot, list[Tensor]] = defaultdict(list)
        for (_, slot), batches in self.values.items():
            found[slot] += batches
        return frozenset(
            slot
            for slot, (first, *rest) in found.items()
            if rest and all(torch.equal(first, each) for each in rest)
        )

    def begin_pass(self) -> None:
        """Note that a pass over a DataLoader begins."""
        self._passes += 1

    def evaluated(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note rows that a forward without gradients read."""
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
    ) -> None:
        """Note the rows; those of a teacher without digests to compare."""
        self.epochs.setdefault(step, self._passes)
        for slot, tensor in _slots(module, args, kwargs):
            if trains:
                self.digests[step, slot] += _digests(tensor)
            if self.keeps_values:
                self.values[step, slot].append(tensor.detach().clone())

    def until(self, step: int) -> RowLog:
        """The log of the steps before one."""
        digests = {key: rows for key, rows in self.digests.items() if key[0] < step}
        return RowLog(
            rank=self.rank, sharers=self.sharers, digests=digests, evaluations=self.evaluations
        )


class DealtRows:
    """Gives each rank the rows that are its share of those that another run read.

    The `j`-th forward of rank `r` of N gets the rows from `(j * N + r) * b`, where `b` is the
    number of rows that the rank would have read. If batches are to be split, that forward gets the
    `r`-th of N equal parts of the batch that the other run's `j`-th forward read.

    Args:
        source: Log of the run that read them, with values.
        rank: This rank.
        world_size: Number of ranks.
        splits: True to split each batch, for scripts whose batch per rank cannot be set.
    """

    def __init__(self, source: RowLog, *, rank: int, world_size: int, splits: bool = False) -> None:
        self.log = RowLog(rank=rank)
        self._splits = splits
        self._source = source
        self._rank = rank
        self._world_size = world_size
        self._dealt: dict[tuple[int, Slot], int] = defaultdict(int)
        self._joined: dict[tuple[int, Slot], Tensor] = {}
        self._constant = source.constant_slots

    def begin_pass(self) -> None:
        """Note that a pass over a DataLoader begins."""
        self.log.begin_pass()

    def read(
        self,
        step: int,
        module: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        trains: bool = True,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the rows."""
        new_args = list(args)
        new_kwargs = dict(kwargs)
        for slot, tensor in _slots(module, args, kwargs):
            dealt = self._rows(step, slot, tensor)
            if slot.argument.isdecimal():
                new_args[int(slot.argument)] = dealt
            else:
                new_kwargs[slot.argument] = dealt
        self.log.read(step, module, tuple(new_args), new_kwargs, trains=trains)
        return tuple(new_args), new_kwargs

    def evaluated(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note rows that a forward without gradients read, which are not dealt."""
        self.log.evaluated(args, kwargs)

    def _rows(self, step: int, slot: Slot, tensor: Tensor) -> Tensor:
        key = step, slot
        if key not in self._source.values:
            raise self._trouble(
                f"expected {slot} in step {step + 1} on one rank too, because its rows are to be "
                "dealt. Run without --feed."
            )
        batches = self._source.values[key]
        if slot in self._constant and torch.equal(batches[0], tensor):
            return tensor
        index = self._dealt[key]
        self._dealt[key] += 1
        if self._splits:
            return self._part(step, slot, batches, index).to(tensor.device)
        if key not in self._joined:
            self._joined[key] = torch.cat(batches)
        rows = self._joined[key]
        start = (index * self._world_size + self._rank) * tensor.shape[0]
        if rows.shape[0] < start + tensor.shape[0]:
            self.log.lacks_rows = True
            raise self._trouble(
                f"expected at least {start + tensor.shape[0]} rows of {slot} in step {step + 1} on "
                f"one rank, got {rows.shape[0]}. Let one rank read as many rows as all ranks "
                "together, with --arguments-of-one."
            )
        return rows[start : start + tensor.shape[0]].to(tensor.device)

    def _trouble(self, text: str) -> UsageError:
        self.log.trouble = text
        return UsageError(text)

    def _part(self, step: int, slot: Slot, batches: Sequence[Tensor], index: int) -> Tensor:
        count = batches[index].shape[0] if index < len(batches) else 0
        if not count or count % self._world_size:
            raise self._trouble(
                f"expected a batch that {self._world_size} ranks can share in forward "
                f"{index + 1} of {slot} in step {step + 1} on one rank, got {count} rows. Let one "
                "rank read as many rows as all ranks together, with --arguments-of-one."
            )
        return batches[index].chunk(self._world_size)[self._rank]


def _slots(
    module: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Slot, Tensor]]:
    for key, value in (*enumerate(args), *kwargs.items()):
        if (
            type(value) is Tensor
            and value.dim()
            and value.numel()
            and not value.requires_grad
            and value.layout is torch.strided
            and value.device.type == "cpu"
            and not torch._C._functorch.is_functorch_wrapped_tensor(value)
        ):
            yield Slot(module, str(key)), value


def _digests(tensor: Tensor) -> list[str]:
    rows = tensor.detach().contiguous()
    if rows.dtype.is_floating_point:
        rows = rows.to(torch.float64)
    return [digest_of(row) for row in rows.reshape(rows.shape[0], -1)]


def digest_of(values: Tensor) -> str:
    """A hash of the bytes of a tensor."""
    # A copy, because memory that numpy has seen cannot be resized, as FSDP2 does.
    content = values.detach().flatten().clone().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class RowDifference:
    """The first step in which ranks together read other rows than the other run."""

    step: int
    slot: Slot
    expected_count: int
    got_count: int
    shared_count: int
    several_count: int
    """Rows that more than one rank read."""
    is_repeated: bool
    """True if every rank read every row."""

    @property
    def text(self) -> str:
        """The difference in words."""
        head = (
            f"in step {self.step + 1} all ranks together read {self.got_count} rows of "
            f"{self.slot}, and the other run read {self.expected_count}; {self.shared_count} are "
            "the same"
        )
        if self.is_repeated:
            return f"{head}; every rank read every row"
        return f"{head}; several ranks read {self.several_count}" if self.several_count else head

    @property
    def remedy(self) -> str:
        """How to let both runs read the same."""
        if self.is_repeated:
            return (
                "Give each rank rows of its own, for example with DistributedSampler and one seed "
                "for all ranks, or pass --all-read-all if ranks share the work on each row, as "
                "with tensor parallelism."
            )
        if self.several_count:
            return (
                "Share the rows of a step out, for example with DistributedSampler and one seed "
                "for all ranks."
            )
        if self.expected_count != self.got_count:
            return "Give the other run as many rows with --arguments-of-one."
        return (
            "Draw the rows of a step alike for any number of ranks, and share them out; or let "
            "--feed deal the rows of one rank to all."
        )


def first_row_difference(
    expected: Sequence[RowLog],
    got: Sequence[RowLog],
    *,
    all_read_all: bool = False,
    steps: int | None = None,
) -> RowDifference | None:
    """The first difference in rows; None if each row was read once on both sides.

    Args:
        expected: Logs of the ranks to compare with.
        got: Logs of the ranks that are judged.
        all_read_all: True if each rank is meant to read all rows, as with tensor parallelism.
        steps: Number of steps to look at; None for all.
    """
    found: list[RowDifference] = []
    slots = {key for log in (*expected, *got) for key in log.digests}
    if steps is not None:
        slots = {(step, slot) for step, slot in slots if step < steps}
    dealt: set[tuple[int, str]] = set()
    for step, slot in sorted(slots):
        ones = sum(_read_once(expected, step, slot), Counter())
        each = _read_once(got, step, slot)
        many = sum(each, Counter())
        if ones == many or (all_read_all and all(rows == ones for rows in each)):
            dealt.add((step, slot.module))
            continue
        found.append(
            RowDifference(
                step=step,
                slot=slot,
                expected_count=ones.total(),
                got_count=many.total(),
                shared_count=(ones & many).total(),
                several_count=sum(1 for row in many if sum(row in rows for rows in each) > 1),
                is_repeated=all(set(rows) == set(ones) for rows in each),
            )
        )
    # Masks and tables of positions are equal in each forward, so all ranks read them.
    return next(
        (
            each
            for each in found
            if not each.is_repeated or (each.step, each.slot.module) not in dealt
        ),
        None,
    )


def _read_once(logs: Sequence[RowLog], step: int, slot: Slot) -> list[Counter[str]]:
    """Rows of each rank; of ranks that share forwards and read the same rows, those of one."""
    kept: list[tuple[RowLog, Counter[str]]] = []
    for log in logs:
        rows = Counter(log.digests.get((step, slot), ()))
        if not any(log.rank in other.sharers and rows == known for other, known in kept):
            kept.append((log, rows))
    return [rows for _, rows in kept]
