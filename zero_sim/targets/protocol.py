"""The protocol between zero_sim and a system under test.

[Note: the least that a target needs]
A target has a name and `build`, which returns an engine with `module`, `zero_grad`, `backward`,
`step` and `params`. This is enough to compare losses and working params on every rank after every
step. Every other method of `FullEngine` adds to the comparison. If an engine lacks it, its state is
*not observed*, which never counts as a pass: see `zero_sim.targets.adapt`. A target also declares
its capabilities and arithmetic: see `zero_sim.targets.declared`.
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
    """Position of a part of a param, constant for a whole run.

    Only `param`, `start` and `stop` are required. But most orders of addition need the other fields
    too, and so does `Costs(calls="reported-buckets")`.

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
    # Offsets and lengths count elements, because a buffer has one dtype. Findings print the
    # position in buffer, bucket and shard.
    flat_start: int | None = None
    """Offset of `start` in the flat buffer. None (here and below) if not reported; the order of
    addition must not depend on positions then."""
    bucket: int | None = None
    """Index of the bucket in its buffer."""
    shard: int | None = None
    """Index of the shard that contains the part; 0 if nothing is sharded."""
    shard_start: int | None = None
    """First element of the shard in the flat buffer."""
    shard_stop: int | None = None
    """End of the shard's half-open range."""
    # Kind, length and offset of the reduction decide in which order ranks are added. For example, a
    # ring cuts a tensor into chunks, and each chunk starts at another rank.
    reduced_by: Literal["reduce_scatter", "reduce_scatter_list", "reduce", "all_reduce"] | None = (
        None
    )
    """The collective that reduces the gradient. Most orders of addition depend on it."""
    call_elems: int | None = None
    """Length of the tensor that this call reduces. If `flat_start` or `call_offset` is None, parts
    with equal `bucket` share a call (with `reduce`: with equal `bucket` and `shard`)."""
    call_offset: int | None = None
    """Offset of `start` in that tensor."""
    # A coalesced call is one call of the backend, so its ring covers all of its tensors.
    joined_elems: int | None = None
    """Total length of the tensors in a coalesced call; None if the call has a single tensor."""
    joined_offset: int | None = None
    """Offset of `start` in the concatenation of these tensors."""
    # A ring's order depends on the offset in the call's tensor, so the sum over replicas needs its
    # own offset.
    replica_sum_at: tuple[int, int] | None = None
    """`(elements, offset)`: length of the tensor summed over the shard's replicas, and offset of
    `start` in it. None if this tensor is the whole shard."""
    # For `Costs(calls="reported-buckets")`, which counts calls by bucket.
    buffer: int = 0
    """Index of the flat buffer."""
    bucket_start: int | None = None
    """First element of the bucket in the flat buffer."""
    bucket_stop: int | None = None
    """End of the bucket's half-open range, padding included."""
    padding_start: int | None = None
    """Start of the padding at the end of the bucket, in the flat buffer."""
    replicas: int = 1
    """Number of ranks in the shard group that keep this part with its state: all of them for a
    small param that stays replicated among sharded params. Each of these ranks reports the part,
    and each report is compared."""
    gathered_by: Literal["all_gather", "all_gather_list", "broadcast"] | None = None
    """The collective that gathers the bucket, from `bucket_start` to `bucket_stop`."""


@dataclass(frozen=True, slots=True)
class OwnedPart:
    """A part of a param that a rank owns, with its optimizer state.

    Tensors are views of live memory, and are read right after a step, before anything else runs.

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

    # Views, not copies, because a large model has no room for a second state.
    place: Place
    """Elements of the part. All tensors below have `stop - start` elements."""
    grad: Tensor | None  # 1D, gradient dtype
    """The reduced gradient, at the point declared in `Numerics.reported_grads`. None before the
    first step, and always if the engine keeps no gradients. Otherwise None stands for zeros, for
    example if the param is frozen in this step."""
    master: Tensor  # 1D, fp32
    """The fp32 master; with `Numerics(masters="param")`, the param in its own dtype."""
    state: Mapping[str, Tensor]  # 1D, or 0-D for counters
    """Optimizer state by torch's keys, such as `exp_avg`, in any dtype. A 0-D tensor, such as
    `step`, belongs to the whole param. If state has another shape than the param, report all of
    it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Record of a step. Fields default to None: not observed.

    Example:
        >>> import torch
        >>> StepResult(norm=torch.tensor(0.5), skipped=False, loss_scale=1024.0).norm
        tensor(0.5000)
    """

    # A tensor, because its dtype decides how it is compared.
    norm: Tensor | None = None  # 0-D, fp32 or fp64
    """Norm of the whole gradient before clipping, without the loss scale. An fp64 norm is compared
    in fp64; with `Numerics(norm="reported")` the reference clips by it in fp64."""
    zeros: int | None = None
    """Number of zero elements in the whole gradient."""
    skipped: bool | None = None
    """True if nothing was updated because a gradient was not finite."""
    loss_scale: float | None = None
    """Factor of the losses in this step, such as 1024.0."""
    raised: str | None = None
    """Error that `step` raised; "" if it returned. Set by the harness if the target declares
    `Numerics(nonfinite="raises")`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """A rank's optimizer settings and loss scale, compared after a load."""

    # By param, because a system's param groups may differ from the scenario's.
    params: Mapping[str, Mapping[str, object]]
    """For each param of which this rank owns a part, the settings of its param group under torch's
    names, such as `betas`; `lr` without `lr_factor`. Omitted settings are not compared."""
    loss_scale: float | None = None
    """Factor of the next loss; None if losses are not scaled."""
    good_steps: int | None = None
    """Steps without overflow since the loss scale changed; None if losses are not scaled."""


class Engine(Protocol):
    """A rank's training engine: the required members.

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
            loss: 0-D. If this rank's forward only reads params that are frozen in this step, the
                loss requires no gradient. Skip `loss.backward()` then, because it would raise, but
                take part in the other ranks' reductions.
            last_micro: True for the last micro-batch of the step.
            rows: Number of rows (samples or tokens) that the loss covers.
        """
        ...

    def step(self, *, lr_factor: float) -> StepResult | None:
        """Reduce all remaining gradients, and update the params on every rank.

        Args:
            lr_factor: Factor of every learning rate in this step; 1.0 without a schedule.

        Returns:
            A record of the step, or None.
        """
        ...

    def params(self) -> Mapping[str, Tensor]:
        """Return whole trainable params on this rank, by their names in the bare model.

        All ranks call this method at the same points, so it may communicate. It is called before
        the first step and after each step, after `settle`, with two exceptions:

        - With `Numerics(grads_in_params=True)` it is also called right after `step`.
        - With `system.overlap_params` it is called without `settle`, after the first micro-batch of
          the next step, because this micro-batch has waited for every gather.

        Return a tied param under its first name. If the mapping contains params that are never
        trained, they are compared with their start values.
        """
        ...


class FullEngine(Engine, Protocol):
    """A rank's training engine: all members. Each member that `Engine` lacks is optional.

    All ranks call each method at the same points, even after findings, so it may communicate.

    If an engine names params differently from the bare model, give it an attribute `names`: a
    mapping from its names to the bare model's. Everything it returns may then use its own names.
    """

    # Training, in call order.

    def step(self, *, lr_factor: float) -> StepResult:
        """Update the params as `Engine.step` does, and return a record of the step."""
        ...

    def start_step(self, *, rows: Sequence[int]) -> None:
        """Prepare for the micro-batches of a step, after `zero_grad`.

        Args:
            rows: Rows in each micro-batch for which this rank has data, in order. To scale losses
                by the step's tokens, sum these counts over ranks in a collective of your own.
        """
        ...

    def start_micro_batch(self, *, last: bool) -> None:
        """Prepare for a forward and its backward, for example by entering DDP's `no_sync`.

        Args:
            last: True for the last micro-batch of the step, whose backward reduces gradients.
        """
        ...

    def backward_terms(self, loss: Tensor, second: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward for a model with a second loss; called in place of `backward`.

        If an engine lacks this method, `backward` gets the sum of both losses. Call backward once,
        on a sum of both: two calls would add gradients in another order than the reference.

        Args:
            loss: The main loss, 0-D.
            second: The second loss, 0-D. Its factor is `Numerics.scale_second`.
            last_micro: As for `backward`.
            rows: As for `backward`.
        """
        ...

    def join_micro_batch(self, *, last: bool) -> None:
        """Take part in a micro-batch for which this rank has no data, with zero gradients.

        Called in place of forward and `backward` in cases with `run.own_micro_batches`, a field
        that the target must follow (`Capabilities.follows`).

        Args:
            last: True for the last micro-batch of the step, whose backward reduces gradients.
        """
        ...

    def settle(self) -> None:
        """Wait for communication that the last step left in flight.

        Called after `step` and `parts` and before `params`; also before a save and after a load.
        With `system.overlap_params` it is only called after the last step. With
        `Capabilities(unsettled=True)` it is called after every second step; after the other steps,
        `params` is called as with `system.overlap_params`.
        """
        ...

    # State to compare.

    def parts(self) -> Iterable[OwnedPart]:
        """Return this rank's parts of the optimizer, with the same places in every call.

        Called after each step. It is also called once before the first step to read the places,
        when there are no gradients.
        """
        ...

    def settings(self) -> Settings:
        """Return optimizer settings and loss scale; called right after a load."""
        ...

    def stray_gradients(self, *, padding_only: bool) -> str:
        """Describe the first nonzero gradient element that must be zero; "" if there is none.

        Args:
            padding_only: False right after `zero_grad`, when all gradients must be zero. True after
                a step, when only padding must be zero.
        """
        ...

    def stray_padding(self) -> str:
        """Describe the first nonzero padding element in working params or masters; "" if none.

        Called after a step, when params can be read.
        """
        ...

    def notes(self) -> Iterable[str]:
        """Return notes on the whole run for the report, such as a version or a setting."""
        ...

    # The end of a run, and checkpoints.

    def unwrap(self) -> nn.Module:
        """Return the module as it was before `build`, with the trained values.

        This is the last call on every rank. Remove the engine's hooks and gradients, and give each
        param memory of its own.
        """
        ...

    def save(self, path: Path, *, form: CheckpointForm) -> None:
        """Save a checkpoint. Called on every rank.

        Args:
            path: Folder to write, the same on every rank. It does not exist yet.
            form: Checkpoint form, from `reload.form`.
        """
        ...

    def save_async(self, path: Path, *, form: CheckpointForm) -> Saving:
        """Start to save the present state. Called on every rank, between two steps.

        Training goes on before `wait()` is called on the returned object, and later changes must
        not reach the checkpoint. Called in cases with `reload.async_steps`, a field that the target
        must follow (`Capabilities.follows`).

        Args:
            path: As for `save`.
            form: As for `save`.
        """
        ...

    def load(self, path: Path, *, weights_only: bool = False) -> None:
        """Load a checkpoint that was saved in any layout. Called on every rank.

        Load persistent buffers too, because the module built for the load may contain other values.
        If your checkpoints have no buffers, declare
        `Capabilities(only=(("model.buffer", ("none", "rebuilt")),))`.

        Called before the first step. With `reload.lost_steps` or `reload.lost_micro_batches`, the
        engine has already trained and has gradients; none of them may remain.

        Args:
            path: Checkpoint folder.
            weights_only: True to load masters, working params and buffers, and keep the fresh
                optimizer state and loss scale.
        """
        ...


class Saving(Protocol):
    """An asynchronous save in progress."""

    def wait(self) -> None:
        """Return when the checkpoint is complete. Called once on every rank."""
        ...


# These protocols have methods only, because `isinstance` cannot check attributes.
@runtime_checkable
class CostedEngine(Protocol):
    """An engine that reports its resident memory, which is compared with the target's `Costs.held`.

    If the target declares no `costs`, an engine with this method is checked against all closed
    forms of its stage: collectives, memory and, if the case overlaps, the issue times of
    collectives. These forms assume that

    - buckets are reduced in turn, the bucket with the first registered param last;
    - each reduction is issued before the next gradient arrives, and waited for after the last;
    - gathers are issued before `step` returns, and waited for when a module that reads their bucket
      begins.
    """

    def held_bytes(self) -> Mapping[str, int]:
        """Return resident bytes, counting each storage once. Must not communicate.

        Returns:
            Bytes by name: `gradients`, and their `sums` over micro-batches; flat `params`;
            `masters`; `state`; the `arena` of whole gradients, if any; and `other` for everything
            else that the engine keeps and that grows with the model. The module's own tensors do
            not count. Example: `{"gradients": 4096, "masters": 4096}`.
        """
        ...


@runtime_checkable
class PeakEngine(CostedEngine, Protocol):
    """An engine that also reports its unsharded memory at any moment of a step."""

    def whole_bytes(self) -> Iterable[tuple[str, str, int]]:
        """Return the present unsharded memory of sharded state, bucket by bucket.

        Returns:
            Tuples of a kind, `gradients` or `params`; the name of a param in the bucket; and the
            bytes of all memory that contains them, counting each storage once. Buckets without
            unsharded memory may be omitted. With `system.arena`, also report the kind `gradients
            outside the arena`. With `reduce_buffer_elems`, list gradients by reduction, and report
            all reduce buffers together as `reduce buffers`.
        """
        ...


@runtime_checkable
class CheckpointedEngine(CostedEngine, Protocol):
    """An engine that reports the memory of its activation checkpoints."""

    def checkpoint_bytes(self) -> int:
        """Return the bytes of activation checkpoints, counting each storage once."""
        ...


@runtime_checkable
class NamedMemoryEngine(Protocol):
    """An engine that names its memory for the memory ledger of a rank."""

    def memory(self) -> Iterable[tuple[str, Tensor]]:
        """Return all named memory that exists now, as names and tensors (or views).

        Returns:
            Lasting memory: `gradients`, their `sums` over micro-batches, `params`, `masters`, and
            each optimizer state under torch's name. Temporary memory: `whole_gradients` and
            `gathered` params. The ledger names all other memory after the phase that allocated it.
        """
        ...


class Target(Protocol):
    """A system under test: a name, and `build` to wrap a module on each rank.

    A target may also have these attributes:

    - `capabilities`: a `Capabilities`; None for every setting of a scenario. The default suits the
      minimal AdamW wrapper in `Engine`.
    - `numerics`: a `Numerics`, or a function from the scenario to a `Numerics`.
    - `costs`: a `Costs`, or a function from the scenario to a `Costs`.
    - `options`: the target's own options, as `Option` by name.
    - `models`: the target's own models, as `OwnModel` by name. Scenarios name `own:NAME`.
    - `refuses(scenario)`: further reasons to refuse a case, as strings or `Problem`s.
    - `reduce_ops(scenario)`: names of reduce operations that the target uses besides SUM.
    - `draws_weights = True`: `build` draws the start values, which `params` then returns.
    - `rank_local`: a `RankLocal`, if the library keeps a rank's state in globals.
    - `reference_step(param, grad, state, settings)` or
      `reference_optimizer(named_params, scenario)`: an update rule for the reference; and
      `reference_state(optimizer, named_params)` if state is not stored by param.

    If a case reloads, capabilities and `refuses` are also checked with the world and layout after
    the checkpoint.

    Example:
        A target for the engine in `Engine`:

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
            module: The bare model, with equal initial bits on every rank.
            scenario: The case. A target reads `system` and `optimizer`.
            group: The data-parallel group.
        """
        ...
