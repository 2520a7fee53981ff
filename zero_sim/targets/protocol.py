"""The small protocol behind which every system under test stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zero_sim.scenario.spec import CheckpointForm, Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a part of a param lies: integers that stay the same for a whole run."""

    param: str
    """Name of the param, as `named_parameters` gives it."""
    start: int
    stop: int
    """Half-open range of the flattened param's elements."""
    flat_start: int
    """Offset of `start` in the flat buffer."""
    bucket: int
    shard: int
    """Index of the shard that holds it, 0 where nothing is sharded."""
    shard_start: int
    shard_stop: int
    """Half-open range of that shard in the flat buffer."""
    reduced_by: Literal["reduce_scatter", "reduce_scatter_list", "all_reduce"]
    """The collective that reduces its gradient; most orders of addition depend on it."""
    call_elems: int
    """Elements of the tensor that is reduced in that one call."""
    call_offset: int
    """Offset of `start` in that tensor."""
    joined_elems: int | None = None
    """Elements of all tensors of a coalesced call; None for a call of one tensor."""
    joined_offset: int | None = None
    """Offset of `start` in all of these, one after another."""


@dataclass(frozen=True, slots=True)
class OwnedPart:
    """A part of one param that a rank owns, with all optimizer state it keeps for it.

    Tensors are views of live state: they are read right after a step, before anything else runs.
    """

    place: Place
    grad: Tensor  # 1D, gradient dtype
    """The reduced gradient, as the collective left it."""
    master: Tensor  # 1D, fp32
    state: Mapping[str, Tensor]  # 1D, or 0-D for counters
    """torch's per-param optimizer state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What an engine says of a step; None for what it does not have."""

    norm: Tensor | None = None  # 0-D, fp32
    """Norm of the whole gradient, before clipping."""
    zeros: int | None = None
    """Elements of the whole gradient that are zero."""
    skipped: bool | None = None
    """Whether nothing was updated, because a gradient was not finite."""
    loss_scale: float | None = None
    """The scale that the step's losses were multiplied by."""


class Engine(Protocol):
    """One rank's training engine."""

    module: nn.Module
    """What the harness calls forward on."""

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        ...

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward for one micro-batch.

        Args:
            loss: 0-D.
            last_micro: Whether the step has no micro-batch after this one.
            rows: Number of rows (samples or tokens) that the loss was taken over.
        """
        ...

    def step(self, *, lr_factor: float) -> StepResult:
        """Reduce what is not reduced yet and update the params on every rank.

        Args:
            lr_factor: What every learning rate is multiplied by in this step.
        """
        ...

    def settle(self) -> None:
        """Wait for whatever the last step left in flight, so that params can be read."""
        ...

    def params(self) -> Mapping[str, Tensor]:
        """Full working params on this rank, trainable ones, by name."""
        ...

    def parts(self) -> Iterable[OwnedPart]:
        """What this rank owns of the optimizer."""
        ...

    def stray_gradients(self, *, padding_only: bool) -> str:
        """Where the gradient buffers hold a nonzero they must not; empty where nowhere.

        Asked twice: right after `zero_grad`, when everything must be zero, and after a step with
        only the padding looked at, which must be zero always.
        """
        ...

    def notes(self) -> Iterable[str]:
        """What a reader should know of the whole run, such as a measured degree of overlap."""
        ...

    def save(self, path: Path, *, form: CheckpointForm) -> None:
        """Save a checkpoint; every rank calls it."""
        ...

    def load(self, path: Path, *, weights_only: bool = False) -> None:
        """Go on from a checkpoint, whatever layout it was saved from; every rank calls it.

        Args:
            path: Where it was saved.
            weights_only: Whether to take masters and working params alone and keep the fresh
                optimizer state and loss scale.
        """
        ...


@runtime_checkable
class PaddedEngine(Protocol):
    """An engine that also tells of the padding of what is no gradient; not all have or tell it."""

    def stray_padding(self) -> str:
        """Where padding of working params or masters is not zero; empty where nowhere.

        Asked after a step, when params can be read.
        """
        ...


@runtime_checkable
class CostedEngine(Protocol):
    """An engine that costs what the textbook says.

    Who has these methods declares that the closed forms of its stage hold for its collectives and
    its memory, and is held to them.
    """

    def held_bytes(self) -> Mapping[str, int]:
        """Bytes that this rank holds between two steps, each memory once.

        Returns:
            `gradients`, and `sums` of them over micro-batches; flat `params`; `masters`; `state`;
            and `other`, whatever else the engine keeps that grows with the model. The module's own
            tensors do not count.
        """
        ...

    def overlap(self) -> Mapping[str, float]:
        """The mean number of collectives in flight while this rank computed: `grads`, `params`."""
        ...


class Target(Protocol):
    """A system under test."""

    name: str

    def build(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> Engine:
        """Wrap the module and its optimizer for training on this rank.

        Args:
            module: The model, with the same initial bits on every rank.
            scenario: The case; a target reads `system` and `optimizer`.
            group: The data-parallel group.
        """
        ...
