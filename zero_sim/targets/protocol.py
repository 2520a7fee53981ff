"""The small protocol behind which every system under test stands.

[Note: what a target must have]
A target needs a name and `build`; the engine that it builds needs `module`, `zero_grad`,
`backward`, `step` and `params`. With that, every rank's losses and working params are compared
after every step. Whatever else of `FullEngine` an engine has is used, and what it has not is
reported as not observed, never as passed: see `zero_sim.targets.adapt`. What a target can be asked
for and how it computes are facts that it declares: `zero_sim.targets.declared`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zero_sim.scenario.spec import CheckpointForm, Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Position of a part of a param: integers that stay the same for a whole run."""

    param: str
    """Name of the param, as `named_parameters` gives it."""
    start: int
    stop: int
    """Half-open range of the flattened param's elements."""
    flat_start: int | None = None
    """Offset of `start` in the flat buffer; None, like all that follows, where it is not told: then
    the order of addition must not depend on positions."""
    bucket: int | None = None
    shard: int | None = None
    """Index of the shard that holds it, 0 where nothing is sharded."""
    shard_start: int | None = None
    shard_stop: int | None = None
    """Half-open range of that shard in the flat buffer."""
    reduced_by: Literal["reduce_scatter", "reduce_scatter_list", "reduce", "all_reduce"] | None = (
        None
    )
    """The collective that reduces its gradient; most orders of addition depend on it."""
    call_elems: int | None = None
    """Elements of the tensor that is reduced in that one call. Parts with one `bucket` are reduced
    in one call if `flat_start` or `call_offset` is None; in one for each `shard` by `reduce`."""
    call_offset: int | None = None
    """Offset of `start` in that tensor."""
    joined_elems: int | None = None
    """Elements of all tensors of a coalesced call; None for a call of one tensor."""
    joined_offset: int | None = None
    """Offset of `start` in all of these, one after another."""
    copies_at: tuple[int, int] | None = None
    """Elements of the tensor that is summed over copies of the shard, and offset of `start` in it;
    None if that tensor is the whole shard."""
    buffer: int = 0
    """Index of the flat buffer."""
    bucket_start: int | None = None
    bucket_stop: int | None = None
    """Half-open range of the bucket, padding included, in the flat buffer; None where not told."""
    padding_start: int | None = None
    """Where the bucket's padding begins, its tail that belongs to no param; None where not told."""
    replicas: int = 1
    """Number of the ranks which share out the state that keep this part, each with state of its
    own: all of them for a small param that is replicated beside sharded ones. Every one of these
    ranks reports it, and each is compared."""
    gathered_by: Literal["all_gather", "all_gather_list", "broadcast"] | None = None
    """The collective that gathers the bucket, from `bucket_start` to `bucket_stop`."""


@dataclass(frozen=True, slots=True)
class OwnedPart:
    """A part of one param that a rank owns, with all optimizer state it keeps for it.

    Tensors are views of live state: they are read right after a step, before anything else runs.
    """

    place: Place
    grad: Tensor | None  # 1D, gradient dtype
    """The reduced gradient, at the point that the target's numerics declare. None before the first
    step, and always in an engine that keeps no gradients. Otherwise None stands for zeros, for
    example of a param that is frozen in this step."""
    master: Tensor  # 1D, fp32
    """The param itself, in its dtype, if the target's numerics declare `masters="param"`."""
    state: Mapping[str, Tensor]  # 1D, or 0-D for counters
    """torch's per-param optimizer state, in any dtype. Of a tensor that has another shape than the
    param all elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Record of a step; None for anything the engine does not have."""

    norm: Tensor | None = None  # 0-D, fp32 or fp64
    """Norm of the whole gradient, before clipping. In fp64 it is compared in fp64, and with
    `Numerics(norm="told")` clipped by in fp64, if that is how the target has it."""
    zeros: int | None = None
    """Elements of the whole gradient that are zero."""
    skipped: bool | None = None
    """Whether nothing was updated, because a gradient was not finite."""
    loss_scale: float | None = None
    """The scale that the step's losses were multiplied by."""
    raised: str | None = None
    """Error that `step` raised, empty if it returned; filled in by the harness for targets that
    declare `Numerics(nonfinite="raises")`, None for all others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of a step besides masters and state; None for anything the engine does not have."""

    params: Mapping[str, Mapping[str, object]]
    """By name of each param that this rank owns any of: what its group in the optimizer says under
    torch's names, such as `betas`, and `lr` before any factor. What is left out is not compared."""
    loss_scale: float | None = None
    """What the next loss is multiplied by."""
    good_steps: int | None = None
    """Steps without overflow since the loss scale last changed."""


class Engine(Protocol):
    """One rank's training engine: what it must have."""

    module: nn.Module
    """What the harness calls forward on; a wrapper may stand around the model."""

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        ...

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward for one micro-batch.

        Args:
            loss: 0-D. It requires no gradient if every param that this rank's forward reads is
                frozen in this step: then skip `loss.backward()`, which would raise, but take part
                in the reductions of the other ranks.
            last_micro: Whether the step has no micro-batch after this one.
            rows: Number of rows (samples or tokens) that the loss was taken over.
        """
        ...

    def step(self, *, lr_factor: float) -> StepResult | None:
        """Reduce what is not reduced yet and update the params on every rank.

        Args:
            lr_factor: What every learning rate is multiplied by in this step.

        Returns:
            What there is to say of the step; None for nothing.
        """
        ...

    def params(self) -> Mapping[str, Tensor]:
        """Full working params on this rank, trainable ones, by their name in the bare model.

        All ranks call it at the same points, so it may communicate. It is called before the first
        step and after each: after `settle`, but for two exceptions. A target that declares
        `Numerics(grads_in_params=True)` is also queried right after `step`. With
        `system.overlap_params` the call comes after the first micro-batch of the next step, which
        has waited for every gather, and without `settle`.

        A tied param has one name, the first one. Those that are never trained may be among them:
        what is told whole is compared with what they were.
        """
        ...


class FullEngine(Engine, Protocol):
    """All that an engine may have; each method that it has is used by itself.

    All ranks call a method at the same points, whatever was found, so it may communicate.

    An engine that knows params by other names than the bare model has `names`, a mapping from its
    own to those; what it tells may then use its own.
    """

    def step(self, *, lr_factor: float) -> StepResult:
        """Update as in `Engine`, with a record of the step."""
        ...

    def start_step(self, *, rows: Sequence[int]) -> None:
        """Get ready for the micro-batches of a step, after `zero_grad`.

        Args:
            rows: Rows of each micro-batch that this rank has data for, in order. Sum them over
                ranks with a collective of your own to scale losses by the tokens of the step.
        """
        ...

    def start_micro_batch(self, *, last: bool) -> None:
        """Get ready for a forward and its backward.

        Args:
            last: Whether the step has no micro-batch after this one, so that gradients are reduced.
        """
        ...

    def backward_terms(self, loss: Tensor, second: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward for a micro-batch of a model with a second loss, in place of `backward`.

        An engine without it gets the sum of both. Call backward once, on a sum of both: two calls
        add gradients in another order than the reference.

        Args:
            loss: The main loss, 0-D.
            second: The second loss, 0-D; as `Numerics.scale_second` declares, its factor may be
                another than that of `loss`.
            last_micro: As for `backward`.
            rows: As for `backward`.
        """
        ...

    def join_micro_batch(self, *, last: bool) -> None:
        """Take part in a micro-batch for which this rank has no data, with gradients of zero.

        In the place of forward and `backward`, in cases with `run.own_micro_batches`, which a
        target has to say that it follows.

        Args:
            last: Whether the step has no micro-batch after this one, so that gradients are reduced.
        """
        ...

    def settle(self) -> None:
        """Wait for whatever the last step left in flight, so that params can be read.

        Called after `step` and `parts` and before `params`, before a save and after a load. With
        `system.overlap_params` not after each step, but after the last one. With
        `Capabilities(unsettled=True)` after every second step, and `params` after the others comes
        as with `system.overlap_params`.
        """
        ...

    def parts(self) -> Iterable[OwnedPart]:
        """What this rank owns of the optimizer.

        Asked once before the first step, when there are no gradients, for the places alone; and
        after each step. Places stay as they were.
        """
        ...

    def settings(self) -> Settings:
        """What this rank steps with; asked right after a load."""
        ...

    def stray_gradients(self, *, padding_only: bool) -> str:
        """Where the gradient buffers hold a nonzero they must not; empty where nowhere.

        Asked twice: right after `zero_grad`, when everything must be zero, and after a step with
        only the padding looked at, which must be zero always.
        """
        ...

    def stray_padding(self) -> str:
        """Where padding of working params or masters is not zero; empty where nowhere.

        Asked after a step, when params can be read.
        """
        ...

    def notes(self) -> Iterable[str]:
        """What a reader should know of the whole run, such as a version or a setting."""
        ...

    def unwrap(self) -> nn.Module:
        """Give the module back as it was, but for the values of its params.

        Asked last of all, on every rank: without hooks or gradients of the engine's, each param in
        memory of its own.
        """
        ...

    def save(self, path: Path, *, form: CheckpointForm) -> None:
        """Save a checkpoint; every rank calls it.

        Args:
            path: Where to save it; does not exist yet, and is the same on every rank.
            form: As `reload.form` says.
        """
        ...

    def save_async(self, path: Path, *, form: CheckpointForm) -> Saving:
        """Begin a checkpoint of what there is now; every rank calls it, between two steps.

        Training goes on before the save that it returns is waited for, and nothing of that may be
        in the checkpoint. Only in cases with `reload.async_steps`, which a target has to say that
        it follows.
        """
        ...

    def load(self, path: Path, *, weights_only: bool = False) -> None:
        """Go on from a checkpoint, whatever layout it was saved from; every rank calls it.

        What goes on includes persistent buffers of the module, which a module that was built for
        the load may begin with other values of. A target whose checkpoints have none declares
        `Capabilities(only=(("model.buffer", ("none", "rebuilt")),))`.

        Called before the first step, and where `reload.lost_steps` or `reload.lost_micro_batches`
        say so on an engine that has trained and holds gradients: nothing of that may be left.

        Args:
            path: Where it was saved.
            weights_only: Whether to take masters, working params and buffers alone and keep the
                fresh optimizer state and loss scale.
        """
        ...


class Saving(Protocol):
    """A save under way."""

    def wait(self) -> None:
        """Come back once the checkpoint is complete; every rank calls it, once."""
        ...


@runtime_checkable
class CostedEngine(Protocol):
    """An engine that tells what it holds, for `Costs.held` of its target.

    Of a target that declares no `costs`, who has this method declares that the closed forms of its
    stage hold for its collectives and its memory, and is held to them. In a case that overlaps,
    that also says when: buckets are reduced one after the other, that of the first registered param
    last, each before the next gradient arrives and without a wait before the last one has; gathers
    are issued by the time a step comes back, and each is waited for when a module begins that reads
    of its bucket.
    """

    def held_bytes(self) -> Mapping[str, int]:
        """Bytes that this rank holds between two steps, each memory once; must not communicate.

        Returns:
            `gradients`, and `sums` of them over micro-batches; flat `params`; `masters`; `state`;
            the `arena` of whole gradients, where there is one; and `other`, whatever else the
            engine keeps that grows with the model. The module's own tensors do not count.
        """
        ...


@runtime_checkable
class PeakEngine(CostedEngine, Protocol):
    """A costed engine that also reports what is whole within a step, so that it is checked."""

    def whole_bytes(self) -> Iterable[tuple[str, str, int]]:
        """What is whole now of what its stage shards, bucket by bucket.

        Returns:
            `gradients` or `params`; the name of a param of the bucket; and the bytes of all memory
            that holds them, each once. A bucket of which nothing is whole may be left out. With
            `system.arena` also `gradients outside the arena`, those bytes of them. With
            `reduce_buffer_elems` gradients by what is reduced together, and all `reduce buffers`.
        """
        ...


@runtime_checkable
class CheckpointedEngine(CostedEngine, Protocol):
    """A costed engine with activation checkpoints, whose bytes are checked."""

    def checkpoint_bytes(self) -> int:
        """Bytes of all memory in which it keeps them now, each once."""
        ...


@runtime_checkable
class NamedMemoryEngine(Protocol):
    """An engine that names its memory, for a ledger of what a rank holds at every moment."""

    def memory(self) -> Iterable[tuple[str, Tensor]]:
        """All memory there is now that has a name, with it; views of it will do.

        Returns:
            Of what lasts `gradients`, `sums` of them over micro-batches, `params`, `masters` and
            each state of the optimizer under torch's name; of what comes and goes
            `whole_gradients` and `gathered` params. Whatever has no name here is told by the phase
            of the step in which it came to be.
        """
        ...


class Target(Protocol):
    """A system under test.

    What it declares besides, in attributes of these names, is read where it is there:
    `capabilities` (`Capabilities`; None for all that a scenario can say), `numerics` (`Numerics`,
    or a function of the case), `options` of its own (`Option` by name), and a method
    `refuses(scenario)` that gives more reasons than the capabilities can say, strings or
    `Problem`s; `models`, models of its own (`OwnModel` by name), which scenarios name `own:NAME`;
    `reduce_ops(scenario)`, the reduce operations besides SUM that it asks of a backend; and
    `draws_weights = True` if `build` draws the start values, which `params` then reports. An update
    rule of its own is `reference_step(param, grad, state, settings)`, or
    `reference_optimizer(named_params, scenario)`, and `reference_state(optimizer, named_params)`
    where state is not by param. Of a case
    that reloads, capabilities and `refuses` are asked once more about the world and the layout
    after the checkpoint.
    """

    name: str

    def build(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> Engine:
        """Wrap the module and its optimizer for training on this rank.

        Args:
            module: The model, with the same initial bits on every rank.
            scenario: The case; a target reads `system` and `optimizer`.
            group: The data-parallel group.
        """
        ...
