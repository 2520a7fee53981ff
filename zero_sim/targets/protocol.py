"""The protocol between zero_sim and a system under test.

[Note: the least that a target needs]
A target has a name and `build`. The engine that `build` returns has `module`, `zero_grad`,
`backward`, `step` and `params`. With these, losses and working params of every rank are compared
after every step. Each further method of `FullEngine` adds to the comparison; without it, the state
that it would report is *not observed*, which is never a pass: see `zero_sim.targets.adapt`. A
target declares its capabilities and its arithmetic: see `zero_sim.targets.declared`.
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
    """Position of a part of a param: integers that stay the same for a whole run.

    `param`, `start` and `stop` are required. The rest defaults to None, for not reported. Most
    orders of addition need it, and so does `Costs(calls="told-buckets")`.

    Example:
        The first 5 elements of a param, in the second of two shards of a buffer of 16 elements:

        >>> Place(param="up.weight", start=0, stop=5, flat_start=8, shard=1, shard_start=8,
        ...       shard_stop=16, reduced_by="reduce_scatter", call_elems=16).call_elems
        16
    """

    param: str
    """Name of the param in the bare model, as in `named_parameters()`."""
    start: int
    """First element of the part in the flattened param."""
    stop: int
    """End of the half-open range `[start, stop)` in the flattened param."""
    # All offsets and lengths below are elements, too, because a buffer has one dtype. First the
    # position in buffer, bucket and shard: findings print it.
    flat_start: int | None = None
    """Offset of `start` in the flat buffer. None, here and below, if not reported: then the order
    of addition must not depend on positions."""
    bucket: int | None = None
    """Index of the bucket in its buffer."""
    shard: int | None = None
    """Index of the shard that contains the part; 0 if nothing is sharded."""
    shard_start: int | None = None
    """First element of the shard in the flat buffer."""
    shard_stop: int | None = None
    """End of the shard's half-open range."""
    # The reduction of the gradient: kind, length and offset decide in which order its ranks are
    # added, for example round a ring, which cuts a tensor into chunks.
    reduced_by: Literal["reduce_scatter", "reduce_scatter_list", "reduce", "all_reduce"] | None = (
        None
    )
    """The collective that reduces the gradient. Most orders of addition depend on it."""
    call_elems: int | None = None
    """Elements of the tensor that this call reduces. If `flat_start` or `call_offset` is None,
    parts with one `bucket` share a call; with `reduce`, those with one `bucket` and `shard`."""
    call_offset: int | None = None
    """Offset of `start` in that tensor."""
    # A coalesced call is one call of the backend, so its ring covers all of its tensors.
    joined_elems: int | None = None
    """Elements of all tensors of a coalesced call; None for a call of one tensor."""
    joined_offset: int | None = None
    """Offset of `start` in these tensors, one after another."""
    # Orders such as a ring's depend on the offset in the tensor of a call, so a sum over replicas
    # has an offset of its own.
    copies_at: tuple[int, int] | None = None
    """`(elements, offset)`: length of the tensor that is summed over replicas of the shard, and
    offset of `start` in it. None if that tensor is the whole shard."""
    # For `Costs(calls="told-buckets")`, which counts calls by bucket.
    buffer: int = 0
    """Index of the flat buffer."""
    bucket_start: int | None = None
    """First element of the bucket in the flat buffer."""
    bucket_stop: int | None = None
    """End of the bucket's half-open range, padding included."""
    padding_start: int | None = None
    """Start of the padding at the end of the bucket, in the flat buffer."""
    replicas: int = 1
    """Number of ranks in the shard group that keep this part, each with its own state: all of them
    for a small param that is replicated beside sharded ones. Each of these ranks reports the part,
    and each is compared."""
    gathered_by: Literal["all_gather", "all_gather_list", "broadcast"] | None = None
    """The collective that gathers the bucket, from `bucket_start` to `bucket_stop`."""


@dataclass(frozen=True, slots=True)
class OwnedPart:
    """A part of one param that a rank owns, with its optimizer state.

    Tensors are views of live memory. They are read right after a step, before anything else runs.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2, 3))
        >>> OwnedPart(
        ...     Place(param="weight", start=0, stop=6),
        ...     grad=None if weight.grad is None else weight.grad.reshape(-1),
        ...     master=weight.detach().reshape(-1),
        ...     state={"step": torch.tensor(0.0), "exp_avg": torch.zeros(6)},
        ... ).master.shape
        torch.Size([6])
    """

    # Live memory and no copies, because a large model has no room for a second state.
    place: Place
    """The elements that the part covers. All tensors below have `stop - start` elements."""
    grad: Tensor | None  # 1D, gradient dtype
    """The reduced gradient, at the point that `Numerics.grads_told` declares. None before the
    first step, and always for an engine that keeps no gradients. Otherwise None stands for zeros,
    for example for a param that is frozen in this step."""
    master: Tensor  # 1D, fp32
    """The fp32 master. If the target declares `Numerics(masters="param")`, the param itself, in
    its own dtype."""
    state: Mapping[str, Tensor]  # 1D, or 0-D for counters
    """Optimizer state by torch's keys, such as `exp_avg`, in any dtype. A 0-D tensor, such as
    `step`, is the whole param's. State of another shape than the param is reported whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Record of a step. Every field defaults to None, for not observed.

    Example:
        >>> import torch
        >>> StepResult(norm=torch.tensor(0.5), skipped=False, loss_scale=1024.0).norm
        tensor(0.5000)
    """

    # A tensor and no float, because its dtype decides how it is compared.
    norm: Tensor | None = None  # 0-D, fp32 or fp64
    """Norm of the whole gradient before clipping, without the loss scale. An fp64 norm is compared
    in fp64; with `Numerics(norm="told")` the reference clips by it in fp64."""
    zeros: int | None = None
    """Number of zero elements in the whole gradient."""
    skipped: bool | None = None
    """True if nothing was updated because a gradient was not finite."""
    loss_scale: float | None = None
    """Factor that multiplied the losses of this step, such as 1024.0."""
    raised: str | None = None
    """Error that `step` raised, empty if it returned. Set by the harness for targets that declare
    `Numerics(nonfinite="raises")`; None for all others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Optimizer settings of a rank and its loss scale, compared after a load."""

    # By param, because groups of a system need not be those of the scenario.
    params: Mapping[str, Mapping[str, object]]
    """For each param that this rank owns any part of, the settings of its group under torch's
    names, such as `betas`; `lr` without `lr_factor`. Omitted settings are not compared."""
    loss_scale: float | None = None
    """Factor of the next loss; None if losses are not scaled."""
    good_steps: int | None = None
    """Steps without overflow since the loss scale last changed; None if losses are not scaled."""


class Engine(Protocol):
    """Training engine of one rank: the required members.

    Example:
        Ten lines around an optimizer, for `Capabilities(stages=(0,))`:

            class MyEngine:
                def __init__(self, module, scenario, group):
                    self.module, self.group = module, group
                    settings = settings_of(scenario.optimizer)
                    self.optimizer = AdamW(module.parameters(), **settings)

                def zero_grad(self):
                    self.optimizer.zero_grad()

                def backward(self, loss, *, last_micro, rows):
                    loss.backward()

                def step(self, *, lr_factor):
                    for param in self.module.parameters():
                        dist.all_reduce(param.grad, group=self.group)
                        param.grad /= self.group.size()
                    self.optimizer.step()

                def params(self):
                    return dict(self.module.named_parameters())
    """

    module: nn.Module
    """Module whose forward the harness calls: the bare model, or a wrapper around it."""

    def zero_grad(self) -> None:
        """Reset the gradients at the start of a step."""
        ...

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward for one micro-batch.

        Args:
            loss: 0-D. It requires no gradient if every param that this rank's forward reads is
                frozen in this step. Skip `loss.backward()` then, because it would raise, but take
                part in the reductions of the other ranks.
            last_micro: True if this is the last micro-batch of the step.
            rows: Number of rows (samples or tokens) that the loss covers.
        """
        ...

    def step(self, *, lr_factor: float) -> StepResult | None:
        """Reduce gradients that are not reduced yet, and update the params on every rank.

        Args:
            lr_factor: Factor of every learning rate in this step, 1.0 without a schedule.

        Returns:
            A record of the step, or None.
        """
        ...

    def params(self) -> Mapping[str, Tensor]:
        """Return whole trainable params on this rank, by their names in the bare model.

        All ranks call it at the same points, so it may communicate. It is called before the first
        step and after each step, after `settle`. There are two exceptions. With
        `Numerics(grads_in_params=True)` it is also called right after `step`. With
        `system.overlap_params` it is called without `settle`, after the first micro-batch of the
        next step, which has waited for every gather.

        A tied param has one name, its first one. If the mapping contains params that are never
        trained, they are compared with their start values.
        """
        ...


class FullEngine(Engine, Protocol):
    """Training engine of one rank: all members, each of which is optional on its own.

    All ranks call each method at the same points, even after findings, so it may communicate.

    If an engine knows params by other names than the bare model, give it an attribute `names`: a
    mapping from its names to those of the bare model. Everything it returns may use its own names
    then.
    """

    # Training, in the order of calls.

    def step(self, *, lr_factor: float) -> StepResult:
        """Update as in `Engine.step`, and return a record of the step."""
        ...

    def start_step(self, *, rows: Sequence[int]) -> None:
        """Prepare for the micro-batches of a step, after `zero_grad`.

        Args:
            rows: Rows of each micro-batch that this rank has data for, in order. To scale losses
                by the tokens of the step, sum them over ranks with a collective of your own.
        """
        ...

    def start_micro_batch(self, *, last: bool) -> None:
        """Prepare for a forward and its backward, for example by entering DDP's `no_sync`.

        Args:
            last: True for the last micro-batch of the step, whose backward reduces gradients.
        """
        ...

    def backward_terms(self, loss: Tensor, second: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward for a micro-batch of a model with a second loss, in place of `backward`.

        An engine without this method gets the sum of both losses in `backward`. Call backward
        once, on a sum of both, because two calls add gradients in another order than the reference.

        Args:
            loss: The main loss, 0-D.
            second: The second loss, 0-D. Its factor is `Numerics.scale_second`.
            last_micro: As for `backward`.
            rows: As for `backward`.
        """
        ...

    def join_micro_batch(self, *, last: bool) -> None:
        """Take part in a micro-batch for which this rank has no data, with gradients of zero.

        Called in place of forward and `backward`, in cases with `run.own_micro_batches`. The
        target's capabilities must follow that field.

        Args:
            last: True for the last micro-batch of the step, whose backward reduces gradients.
        """
        ...

    def settle(self) -> None:
        """Wait for communication that the last step left in flight.

        Called after `step` and `parts` and before `params`; before a save and after a load. With
        `system.overlap_params` it is called after the last step only. With
        `Capabilities(unsettled=True)` it is called after every second step; after the others,
        `params` is called as with `system.overlap_params`.
        """
        ...

    # State to compare.

    def parts(self) -> Iterable[OwnedPart]:
        """Return the parts of the optimizer that this rank owns, the same places in every call.

        Called after each step, and once before the first step for the places alone, when there
        are no gradients.
        """
        ...

    def settings(self) -> Settings:
        """Return optimizer settings and loss scale; called right after a load."""
        ...

    def stray_gradients(self, *, padding_only: bool) -> str:
        """Describe the first nonzero element of gradient buffers that must be zero; "" if none.

        Args:
            padding_only: False right after `zero_grad`, when all gradients must be zero. True
                after a step, when padding must be zero.
        """
        ...

    def stray_padding(self) -> str:
        """Describe the first nonzero padding element of working params or masters; "" if none.

        Called after a step, when params can be read.
        """
        ...

    def notes(self) -> Iterable[str]:
        """Return notes on the whole run for the report, such as a version or a setting."""
        ...

    # The end of a run, and checkpoints.

    def unwrap(self) -> nn.Module:
        """Return the module as it was before `build`, with the trained values.

        The last call on every rank. The engine's hooks and gradients must be gone, and each param
        must have memory of its own.
        """
        ...

    def save(self, path: Path, *, form: CheckpointForm) -> None:
        """Save a checkpoint; every rank calls it.

        Args:
            path: Folder to write, the same on every rank. It does not exist yet.
            form: Form of the checkpoint, from `reload.form`.
        """
        ...

    def save_async(self, path: Path, *, form: CheckpointForm) -> Saving:
        """Start to save the present state; every rank calls it, between two steps.

        Training goes on before `wait()` of the returned object is called. No later change may
        reach the checkpoint. Called in cases with `reload.async_steps`, which the target's
        capabilities must follow.

        Args:
            path: As for `save`.
            form: As for `save`.
        """
        ...

    def load(self, path: Path, *, weights_only: bool = False) -> None:
        """Load a checkpoint that was saved from any layout; every rank calls it.

        Persistent buffers of the module are loaded, too, because the module that was built for
        the load may have other values in them. If your checkpoints contain none, declare
        `Capabilities(only=(("model.buffer", ("none", "rebuilt")),))`.

        Called before the first step. With `reload.lost_steps` or `reload.lost_micro_batches` it is
        called on an engine that has trained and has gradients, none of which may remain.

        Args:
            path: Folder of the checkpoint.
            weights_only: True to load masters, working params and buffers, and keep the fresh
                optimizer state and loss scale.
        """
        ...


class Saving(Protocol):
    """An asynchronous save in progress."""

    def wait(self) -> None:
        """Return when the checkpoint is complete; every rank calls it once."""
        ...


# Protocols with methods only, so that `isinstance` can check an engine for them.
@runtime_checkable
class CostedEngine(Protocol):
    """An engine that reports resident memory, for `Costs.held` of its target.

    If the target declares no `costs`, an engine with this method is checked against all closed
    forms of its stage: collectives, memory and, in a case that overlaps, times. Buckets are then
    reduced one after the other, the one with the first registered param last. Each is issued
    before the next gradient arrives, and waited for after the last one has arrived. Gathers are
    issued before `step` returns. Each is waited for when a module that reads from its bucket
    begins.
    """

    def held_bytes(self) -> Mapping[str, int]:
        """Return the bytes of resident memory, each storage once; must not communicate.

        Returns:
            Bytes by name: `gradients`, and `sums` of them over micro-batches; flat `params`;
            `masters`; `state`; the `arena` of whole gradients, if there is one; and `other`, for
            everything else that the engine keeps and that grows with the model. The module's own
            tensors do not count. For example `{"gradients": 4096, "masters": 4096}`.
        """
        ...


@runtime_checkable
class PeakEngine(CostedEngine, Protocol):
    """An engine that also reports unsharded memory within a step, which is checked then."""

    def whole_bytes(self) -> Iterable[tuple[str, str, int]]:
        """Return the unsharded memory of state that the stage shards, bucket by bucket.

        Returns:
            Tuples of `gradients` or `params`; the name of a param of the bucket; and the bytes of
            all memory that contains them, each storage once. Buckets without unsharded memory may
            be omitted. With `system.arena` also `gradients outside the arena`, which counts those
            bytes alone. With `reduce_buffer_elems` gradients are listed by reduction, and
            `reduce buffers` has the bytes of all of them.
        """
        ...


@runtime_checkable
class CheckpointedEngine(CostedEngine, Protocol):
    """An engine with activation checkpoints, whose bytes are checked."""

    def checkpoint_bytes(self) -> int:
        """Return the bytes of all memory of activation checkpoints, each storage once."""
        ...


@runtime_checkable
class NamedMemoryEngine(Protocol):
    """An engine that names its memory, for a ledger of a rank's memory over time."""

    def memory(self) -> Iterable[tuple[str, Tensor]]:
        """Return all named memory that exists now, as names and tensors; views will do.

        Returns:
            Lasting memory: `gradients`, `sums` of them over micro-batches, `params`, `masters`,
            and each state of the optimizer under torch's name. Temporary memory:
            `whole_gradients` and `gathered` params. The ledger names all other memory after the
            phase of the step that allocated it.
        """
        ...


class Target(Protocol):
    """A system under test: a name, and `build` to wrap a module for one rank.

    These attributes declare more. Each is optional.

    - `capabilities`: a `Capabilities`; None for everything that a scenario can contain. Default:
      those of ten lines around AdamW.
    - `numerics`: a `Numerics`, or a function from the scenario to one.
    - `costs`: a `Costs`, or a function from the scenario to one.
    - `options`: options of the target's own, as `Option` by name.
    - `models`: models of the target's own, as `OwnModel` by name. Scenarios name `own:NAME`.
    - `refuses(scenario)`: further reasons to refuse a case, as strings or `Problem`s.
    - `reduce_ops(scenario)`: names of the reduce operations that the target uses besides SUM.
    - `draws_weights = True`: `build` draws the start values, which `params` then returns.
    - `rank_local`: a `RankLocal`, for a library that keeps state of a rank in globals.
    - `reference_step(param, grad, state, settings)` or
      `reference_optimizer(named_params, scenario)`: an update rule for the reference; and
      `reference_state(optimizer, named_params)` if state is not stored by param.

    For a case that reloads, capabilities and `refuses` are also checked with the world and the
    layout after the checkpoint.

    Example:
        A target for the engine of ten lines:

            class MyTarget:
                name = "mine"
                capabilities = Capabilities(stages=(0,), follows=ADAMW_SETTINGS)

                def build(self, module, *, scenario, group):
                    return MyEngine(module, scenario, group)
    """

    # Optional attributes are not listed here, because a Protocol would require them.
    name: str
    """Name in reports, such as `mine`."""

    def build(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> Engine:
        """Wrap the module and its optimizer for training on this rank.

        Args:
            module: The bare model, with the same initial bits on every rank.
            scenario: The case. A target reads its `system` and `optimizer`.
            group: The data-parallel group.
        """
        ...
