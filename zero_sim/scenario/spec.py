"""Records of a case: frozen, without behaviour, and without third-party imports.

The string under a field is its only description: the JSON Schema, the reference page and the
command line show it. `zero_sim.scenario.rules` checks ranges and combinations of fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, NewType

ModelName = Literal[
    "mlp", "params", "transformer-260", "digits", "unusual", "moe", "fp8", "bit-hash", "ternary",
    "tp-block", "positional", "gpt", "multi-token",
]  # fmt: skip
# `kinds.OWN_MODEL` is its pattern, which pydantic does not check; `decode` does.
OwnModelName = NewType("OwnModelName", str)
"""Name of a model that the target brings: `own:NAME`, for entry NAME of its `models`."""
AnyModelName = ModelName | OwnModelName
DtypeName = Literal["fp32", "bf16", "fp16"]
Recompute = Literal["none", "reentrant", "non-reentrant"]
OptimizerName = Literal[
    "adamw", "adam", "sgd", "rmsprop", "adagrad", "nadam", "radam", "adamax", "adadelta", "asgd",
    "rprop", "muon", "lamb", "own",
]  # fmt: skip
PartitionName = Literal["padded", "uneven", "rows", "one-owner"]
CheckpointForm = Literal["sharded", "consolidated"]
FaultName = Literal["crash", "stall", "corrupt", "drop", "duplicate", "slow"]
# Collectives that a planned fault can count. `_list` marks calls with a tensor per rank.
CollectiveName = Literal[
    "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_list", "all_gather",
    "all_gather_list", "broadcast", "scatter", "gather", "all_to_all", "all_to_all_list", "barrier",
]  # fmt: skip
OrderName = Literal[
    "linear", "linear-fp32", "tree", "ring", "gloo", "nccl-ring", "nccl-sym", "random-tree"
]

# For pydantic: refuse unknown fields, and take descriptions from the strings under fields.
_FORBID: dict[str, object] = {"extra": "forbid", "use_attribute_docstrings": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class FreezeSpec:
    """A param that is frozen for a span of steps. It and its optimizer state must not change."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    param: str
    """Name of the param."""
    start: int
    """First step in which the param is frozen, counted from 0."""
    stop: int
    """First step after the span, in which the param is trained again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipSpec:
    """A bare param that no loss reads for a span of steps."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    param: str
    """Name of the param."""
    start: int
    """First step in which no loss reads the param, counted from 0."""
    stop: int
    """First step after the span, in which all losses read the param again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OneRankSpec:
    """A bare param that only one rank's loss reads."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    param: str
    """Name of the param."""
    rank: int
    """Group rank in the dp-cp group."""
    micro_batch: int | None = None
    """The rank's only micro-batch that reads the param, counted from 0. If omitted, all do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """The model that every rank trains."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    name: AnyModelName
    """`mlp`: residual MLP blocks; `params`: bare params, in no layer, with the given shapes;
    `transformer-260`: the walkthrough's transformer with 260 elements; `digits`: a small network
    for handwritten digits; `unusual`: frozen, tied, unused, empty, strided and mixed-dtype params,
    a param used twice, and params used only on one rank or in one micro-batch; `moe`: a mixture of
    experts with an fp32 router, whose experts are distributed over ranks; `fp8`: `mlp` with weight
    matrices in fp8, each with a scale; `bit-hash`: bare params whose gradients depend on every bit
    of every param; `ternary`: ordinary layers on small integers; `tp-block`: attention and two
    layers, split over tensor-parallel ranks, on small integers; `positional`:
    `weight * x + position`, where both terms get the same gradient tensor; `gpt`: a small language
    model of torch's layers, with a tied head and a block used twice; `multi-token`: a language
    model with a second loss, which a system may scale separately; `own:NAME`: a model that the
    target brings. `bit-hash` and `ternary` have the same reduced gradients in any order."""
    dtype: DtypeName = "fp32"
    """Dtype of the working params; for fp8 params, dtype of their gradients. Masters in the
    optimizer are always fp32."""
    # `applies.USED_BY` must list the same models as the descriptions below.
    hidden: int = 8
    """Features of a block, for models `mlp`, `fp8`, `digits`, `moe`, `ternary`, `tp-block`,
    `positional`, `gpt` and `multi-token`. The inner layer is four times as wide in `mlp`, twice as
    wide in `ternary` and `tp-block`."""
    blocks: int = 2
    """Number of residual blocks, for models `mlp`, `fp8`, `tp-block` and `gpt`."""
    experts: int = 4
    """Number of experts over all ranks, for model `moe`; a multiple of `topology.ep`."""
    fp8_format: Literal["e4m3", "e5m2", "mixed"] = "mixed"
    """Format of the weight matrices, for model `fp8`. `mixed`: e4m3 for the first matrix of a
    block, e5m2 for the second."""
    shapes: tuple[tuple[int, ...], ...] | None = None
    """Shapes of the params in registration order, for models `params` and `bit-hash`, which need
    them; a zero makes an empty param. Example: `[[3], [2, 4]]`."""
    nested: bool = False
    """True if each bare param has its own child module (`m0.p0`), for model `params`. `freeze`
    takes the full name; the other fields that list bare params take `p0`."""
    tied: tuple[str, ...] = ()
    """Names of tied params, for model `params`. Each gets a second name in module `again`, such as
    `again.p0`, and the loss reads both."""
    tied_first: bool = False
    """True if the loss reads the second names of `tied` params before all others."""
    unused: tuple[str, ...] = ()
    """Names of params that no loss reads, for model `params`. Backward gives them no gradient."""
    skip: tuple[SkipSpec, ...] = ()
    """Params that no loss reads for some steps, for model `params`. Backward then gives them no
    gradient. If `nested`, their modules are not called."""
    one_rank: tuple[OneRankSpec, ...] = ()
    """Params that only one rank reads, or only one of its micro-batches, for model `params`. All
    other losses give them no gradient."""
    freeze: tuple[FreezeSpec, ...] = ()
    """Params that are frozen for some steps."""
    buffer: Literal["none", "saved", "rebuilt"] = "none"
    """Module buffer `gain`, drawn from the seed, by which forward multiplies its outputs. `saved`:
    persistent, so checkpoints must contain it: a module built for a load starts with another value.
    `rebuilt`: not persistent, so each process builds it. Not for `moe`, `tp-block`, `fp8`,
    `bit-hash`, `ternary`, `multi-token` and own models."""
    recompute: Recompute = "none"
    """Activation checkpointing with `torch.utils.checkpoint`: backward runs each block or expert
    again. For models `mlp`, `gpt`, `moe` and `transformer-260`. `none` keeps activations, as the
    reference always does. The block that `gpt` uses twice has no reentrant checkpoint."""
    distinct_start: bool = False
    """True if ranks start with different params and buffers, so the system must broadcast the
    values of the first rank that has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NanSpec:
    """A NaN or infinity planted in the inputs of one rank in one step."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    step: int
    """Step, counted from 0."""
    rank: int
    """World rank."""
    value: Literal["nan", "inf"] = "nan"
    """Planted value."""
    micro_batch: int = 0
    """Micro-batch of the rank in this step, counted from 0."""
    element: int = 0
    """Index of an element in the micro-batch's inputs, modulo their number. Inputs of bare params
    are factors of the params' elements, so the value stays in a single param's gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """Training data of the ranks."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    ranks: Literal["distinct", "same"] = "distinct"
    """`distinct`: each rank has its own data; `same`: every rank has rank 0's data."""
    rows: int = 4
    """Rows (samples) in one micro-batch on one rank."""
    uneven_rows: bool = False
    """True if rank r has r % 3 additional rows in each micro-batch."""
    epoch_steps: int | None = None
    """Steps in an epoch. As with a loader without `drop_last`, micro-batches in its last step have
    half of `rows`, rounded down, on every rank. If omitted, all steps have `rows`."""
    loss: Literal["mean", "sum", "mean-of-ranks"] = "mean"
    """Loss of a micro-batch: mean over its rows, sum over its rows, or mean divided by the number
    of ranks. `sum` and `mean-of-ranks` need model `mlp`, `fp8` or `params`."""
    nan: NanSpec | None = None
    """Planted NaN or infinity, if any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldSpec:
    """The simulated cluster."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    size: int = 2
    """Number of ranks."""
    order: OrderName = "linear"
    """Order and precision in which a reduction adds the values of its ranks. `linear`: by rank;
    `linear-fp32`: by rank, 16-bit data in fp32; `tree`: neighbours first; `ring`: round a ring;
    `gloo`, `nccl-ring`, `nccl-sym`: like gloo, NCCL's ring or NCCL's symmetric-memory kernels;
    `random-tree`: binary trees drawn from the seed."""
    order_known: bool = True
    """True if the judge knows `order`. If false, a sum must lie within a bound proven from the
    ranks' gradients, and all values computed from the sum must match bit for bit."""
    schedule: Literal["round-robin", "random", "pct"] = "round-robin"
    """Choice of the next rank to run: in turn, or drawn from the seed, at random or by PCT."""
    timing: Literal["eager", "lazy", "hostile"] = "eager"
    """Time at which a collective reads inputs and writes outputs. `eager`: when all ranks have
    called it; `lazy`: as late as waits allow; `hostile`: between these, drawn from the seed."""
    races: bool = False
    """True if every tensor operation is checked against memory in flight."""
    strict: bool = True
    """True to refuse calls that gloo accepts but NCCL does not: tensors that are not contiguous,
    overlap or differ in shape between ranks, two buffers that ranks pass in swapped order, calls
    without a wait, groups used in different orders."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologySpec:
    """Arrangement of the ranks; the data-parallel size is `world.size` divided by tp x cp x pp.

    Ranks that differ in `tp` or `pp` train different params. Each set of params has its own dp-cp
    group.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    tp: int = 1
    """Tensor-parallel size."""
    cp: int = 1
    """Context-parallel size. These ranks train the same params, like data-parallel ranks."""
    pp: int = 1
    """Pipeline-parallel size."""
    ep: int = 1
    """Expert-parallel size, for model `moe`. Group rank i in a dp-cp group has share i % ep of the
    experts; ranks with the same share sum its gradients."""
    shared: tuple[str, ...] = ()
    """Name endings of params that every tensor-parallel rank has whole; needs `tp` > 1. The norm
    counts them on the first such rank only."""
    tied: tuple[str, ...] = ()
    """Name endings of params tied between pipeline-parallel ranks; needs `pp` > 1. The norm counts
    them on the first such rank only."""
    # Not a Literal of all 24 orders: `conditions` checks that each axis occurs once.
    order: str = "tp-cp-dp-pp"
    """Axes joined by hyphens, fastest first: neighbouring ranks differ in the first axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionSpec:
    """An option: a setting that only this target has."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    name: str
    """Name that the target declares."""
    value: str
    """Value as text: `true`, `2.5`, `sum`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemSpec:
    """The system under test and its settings."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    # No Literal, because `targets.registry` has the names, and it may import this module only.
    target: str = "zero_sim"
    """Name of a registered target."""
    options: tuple[OptionSpec, ...] = ()
    """Non-default options of the target."""
    stage: Literal[0, 1, 2, 3] = 1
    """ZeRO stage. 0: plain data parallelism; 1: sharded optimizer state; 2: gradients too; 3:
    params too."""
    divide: Literal["none", "pre", "post", "premul"] = "post"
    """Averaging of gradients. `none`: keep the sum; `pre`: each rank divides its gradient before
    the sum, in the gradient's dtype; `post`: divide the sum in fp32; `premul`: each rank multiplies
    its gradient before the sum by the reciprocal, rounded to the gradient's dtype."""
    divide_by: Literal["ranks", "micro-batches", "tokens"] = "ranks"
    """Divisor, unless `divide` is `none`: the number of ranks, of micro-batches with data (in this
    step, on all ranks), or of rows in these micro-batches (`tokens`)."""
    sync: Literal["last", "every"] = "last"
    """Time of the sum over ranks. `last`: after the last micro-batch, over the gradients that each
    rank has accumulated; `every`: after every micro-batch, and the sums are accumulated."""
    redundancy: int = 1
    """Number of replicas of the sharded state. Consecutive ranks form this many shard groups, and
    each group has the whole state."""
    partition: PartitionName = "padded"
    """Rule that cuts a bucket into shards, at stages 1 to 3. `padded`: equal shards after padding;
    `uneven`: no padding, the first shards one element longer if needed; `rows`: each param padded
    to whole rows of dim 0; `one-owner`: each bucket whole on one rank, in turn."""
    param_order: Literal["registration", "reverse"] = "registration"
    """Order of params in their flat buffer."""
    # `derived.overlaps_grads` and `derived.overlaps_params` replace None in these two.
    overlap_grads: bool | None = None
    """True if buckets are reduced during backward. If omitted, true if `bucket_elems` is set."""
    overlap_params: bool | None = None
    """True if buckets are gathered during the next forward, at stages 1 and 2. If omitted, true if
    `bucket_elems` is set and `gather_chunk_elems` is not."""
    sum_by: Literal["reduce-scatter", "all-reduce", "first-rank"] = "reduce-scatter"
    """Sum of a sharded bucket's gradients. `reduce-scatter`: each rank gets its shard;
    `all-reduce`: each rank gets the whole sum and keeps its shard; `first-rank`: the first rank
    receives all gradients and broadcasts their sum, the naive way (also at stage 0)."""
    gather_after_step: bool = False
    """True if params are gathered and resharded once more after the step, at stage 3."""
    reduce_buffer_elems: int | None = None
    """Size of a reduce buffer in elements, at stages 1 and 2. Backward copies gradients into it,
    and each owner's part is reduced to the owner. With `overlap_grads`, two buffers take turns. A
    longer gradient is reduced by itself. If omitted, gradients are reduced by bucket."""
    contiguous_grads: bool = True
    """True if each gradient is copied into the reduce buffer at once. If false, gradients are
    copied into new memory before their common reduction. Needs `reduce_buffer_elems`."""
    gather_chunk_elems: int | None = None
    """Most elements per gather, over all ranks, at stages 1 and 2. If omitted, whole buckets."""
    arena: bool = False
    """True if unsharded gradients, at stages 2 and 3, use memory that is allocated once."""
    buffers_by: Literal["dtype", "param-group"] = "dtype"
    """Params that share a flat buffer: those with the same kind and dtype, or (`param-group`) also
    in the same param group."""
    offload_state: bool = False
    """True if fp32 masters and optimizer state are on the CPU, which also computes the step."""
    checkpoints: Literal["none", "whole", "split"] = "none"
    """Activations kept for each block of model `tp-block`. `none`: all that autograd saves;
    `whole`: the block's input, so that backward runs the block again; `split`: this tensor-parallel
    rank's part of the input, all-gathered before use."""
    offload_checkpoints: bool = False
    """True if activation checkpoints are kept on the CPU; needs `checkpoints`."""
    step_buffer_elems: int | None = None
    """Size of the step buffer in elements. Gradients pass through it as fp32 for unscaling, norm,
    clipping and step. A longer fragment is handled by itself. If omitted, all elements that a rank
    owns are handled at once."""
    prefetch: int | None = None
    """Buckets gathered ahead of use, in forward and backward, at stage 3. If omitted, 1."""
    reshard_after_forward: bool = True
    """True if params are resharded between a forward and its backward, at stage 3."""
    grad_dtype: Literal["param", "fp32"] = "param"
    """Dtype of the gradient buffer, in which micro-batches are accumulated and ranks are summed."""
    bucket_elems: int | None = None
    """Bucket size in elements: a bucket is closed after the param that reaches it. If omitted, each
    flat buffer is one bucket."""
    align_elems: int = 1
    """Alignment of every shard's start, in elements."""
    align_bytes: int = 1
    """Alignment in bytes, in addition to `align_elems`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamGroupSpec:
    """A param group."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    match: str
    """Ending of the params' names. A param belongs to the first group that matches."""
    lr: float | None = None
    """Learning rate. If omitted, the optimizer's."""
    weight_decay: float | None = None
    """Weight decay. If omitted, the optimizer's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaleSpec:
    """Dynamic loss scaling: doubles the scale after some finite steps, halves it after others."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    # A power of two, so that scaling changes no bit of a gradient.
    initial: float = 1024.0
    """Scale of the first step, a power of two up to 2^64."""
    growth_interval: int = 2
    """Number of consecutive finite steps after which the scale doubles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """The optimizer, with torch's names and defaults."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    name: OptimizerName = "adamw"
    """Class in `torch.optim`; or `muon` (orthogonal updates of matrices) or `lamb` (steps in
    proportion to a param's norm), which need whole params; or `own`, the target's update rule,
    which may read any setting below."""
    # `applies.USED_BY` lists the optimizers that use each setting.
    lr: float = 1e-3
    """Learning rate."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to `lr`; 0 for a constant rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the moments, for `adam`, `adamw`, `nadam`, `radam`, `adamax`, `lamb`."""
    eps: float = 1e-8
    """Term added to the denominator, for optimizers with one."""
    weight_decay: float = 0.0
    """Weight decay; not for `rprop`."""
    momentum: float = 0.0
    """Momentum, for `sgd`, `rmsprop` and `muon`."""
    nesterov: bool = False
    """True for Nesterov momentum, for `sgd` and `muon`."""
    amsgrad: bool = False
    """True to keep the largest second moment, for `adam` and `adamw`."""
    foreach: bool = False
    """True if the system under test steps with torch's foreach kernels. The reference uses these
    kernels only off the CPU, because there they round differently from the loop."""
    groups: tuple[ParamGroupSpec, ...] = ()
    """Param groups with their own settings. Params without a group use the settings above."""
    clip_norm: float | None = None
    """Largest norm over all params. A larger norm scales gradients down."""
    clip_value: float | None = None
    """Largest magnitude of a gradient element. Larger elements are clamped."""
    loss_scale: LossScaleSpec | None = None
    """Dynamic loss scaling, if any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """Length of the training, and its seed."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    steps: int = 3
    """Number of optimizer steps."""
    micro_batches: int = 1
    """Micro-batches that each rank accumulates in a step."""
    own_micro_batches: tuple[int, ...] = ()
    """Numbers of micro-batches with data, as a cycle: rank r in step s has data for entry (r + s) %
    length. The rank joins its other micro-batches with zero gradients. If empty, every rank has
    data for all."""
    evaluate: Literal["never", "between-steps", "within-step"] = "never"
    """Time of a forward under `no_grad` on the first micro-batch of each step. `between-steps`:
    before `zero_grad`; `within-step`: after the last backward, before the optimizer step. The
    training forward must have the same loss."""
    seed: int = 0
    """Seed of weights, data, schedule, faults and every rank's random numbers."""
    stall_seconds: float = 60.0
    """Longest time that a rank may compute without a call to torch.distributed while other ranks
    wait, in seconds. The judge's time does not count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectSpec:
    """Conditions besides equality with the reference."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    accuracy_min: float | None = None
    """Least accuracy on held-out data after the last step, 0 to 1; for model `digits`."""
    nonzero_min: float = 0.25
    """Least fraction of gradient elements that must be nonzero in some step, 0 to 1."""
    one_device: bool = False
    """True if the reduced gradient must equal, bit for bit, the gradient of a single device with
    rank 0's data. Needs ranks with the same data; holds only for some numbers of ranks."""
    # Not a Literal, so that `rules` can suggest a similar check or area.
    finding: str | None = None
    """Check (`equality.grad`) or area of checks (`equality`) that must have a finding in the first
    bad step; otherwise the case fails. If omitted, no finding is expected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultSpec:
    """A fault planned on one rank, to test that it is noticed."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    kind: FaultName
    """`crash`: the rank raises at a call; `stall`: it never reaches the call; `corrupt`: one bit in
    its sent or received data is flipped; `drop`: its data is lost; `duplicate`: its data counts
    twice in a reduction, and replaces the next rank's data in a gather; `slow`: during the whole
    run, the rank gets the baton only if no other rank can run."""
    rank: int
    """World rank."""
    call: int = 0
    """Index of the call among the rank's own collectives, counted from 0. With `at = "random"`, the
    start of the range to draw from. Not for `slow`."""
    at: Literal["call", "random"] = "call"
    """`call`: the fault is at `call`; `random`: at a call drawn from the seed."""
    call_stop: int | None = None
    """End of the range to draw from (exclusive); needs `at = "random"`."""
    collective: CollectiveName | None = None
    """Only collective that `call` counts, if any."""
    side: Literal["send", "receive"] = "send"
    """Corrupted data: the rank's contribution, or its received data. For `corrupt`."""
    element: int | None = None
    """Element of the corrupted data, counted from 0. If omitted, drawn. For `corrupt`."""
    bit: int | None = None
    """Flipped bit, counted from the least significant. If omitted, drawn. For `corrupt`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReloadSpec:
    """Save a checkpoint, and continue from it in another world with another layout.

    An omitted layout field keeps its value from before.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    step: int
    """Steps before the checkpoint is saved; at least 1 and less than `run.steps`."""
    async_steps: int = 0
    """Steps trained during an asynchronous save. They are not in the checkpoint, so they are
    trained again after the load. 0: training waits for the save."""
    form: CheckpointForm = "sharded"
    """`sharded`: one file per rank; `consolidated`: one file with unsharded params."""
    lost_steps: int = 0
    """Steps that the loading engine has trained before the load, and whose gradients it still has.
    The load must discard all this. 0: the engine is new."""
    lost_micro_batches: int = 0
    """Micro-batches that the loading engine has trained in one more, unfinished step; at most
    `run.micro_batches`."""
    early_save: bool = False
    """True if the engine also saves a checkpoint before its first step, which is never loaded."""
    weights_only: bool = False
    """True to load only masters, working params and persistent buffers. Optimizer state and loss
    scale start anew."""
    # `fitting.RELOADED` maps the fields below to the paths that they replace.
    world_size: int | None = None
    """Number of ranks after the load."""
    stage: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage after the load."""
    ep: int | None = None
    """Expert-parallel size after the load."""
    redundancy: int | None = None
    """Number of replicas of the sharded state after the load."""
    bucket_elems: int | None = None
    """Bucket size after the load, in elements."""
    partition: PartitionName | None = None
    """Partition after the load."""
    param_order: Literal["registration", "reverse"] | None = None
    """Order of params after the load."""
    reduce_buffer_elems: int | None = None
    """Size of a reduce buffer after the load, in elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSpec:
    """Compare with a second layout, which must give the same state.

    The second layout runs first. After every step, both layouts must have the same params and
    optimizer state, bit for bit. An omitted field has the case's value.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    # `pair.PAIRED` maps these fields to the paths that they replace.
    world_size: int | None = None
    """Number of ranks in the second layout."""
    stage: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage in the second layout."""
    redundancy: int | None = None
    """Number of replicas of the sharded state in the second layout."""
    bucket_elems: int | None = None
    """Bucket size in the second layout, in elements."""
    partition: PartitionName | None = None
    """Partition in the second layout."""
    param_order: Literal["registration", "reverse"] | None = None
    """Order of params in the second layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A complete case: everything needed to build, run and judge it."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    # Without a default, so that files state their version.
    schema: Literal[1]
    """Version of this format."""
    name: str = ""
    """Case id; by default the file's stem. Values of the matrix are appended."""
    description: str = ""
    """Purpose of the case, in a sentence."""
    model: ModelSpec
    """The model that every rank trains."""
    data: DataSpec = field(default_factory=DataSpec)
    """Training data of the ranks."""
    world: WorldSpec = field(default_factory=WorldSpec)
    """The simulated cluster."""
    topology: TopologySpec = field(default_factory=TopologySpec)
    """Arrangement of the ranks along parallel axes."""
    system: SystemSpec = field(default_factory=SystemSpec)
    """The system under test."""
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    """The optimizer."""
    run: RunSpec = field(default_factory=RunSpec)
    """Length of the training, and its seed."""
    reload: ReloadSpec | None = None
    """Save and reload between two steps, if any."""
    pair: PairSpec | None = None
    """A second layout to compare with, if any."""
    faults: tuple[FaultSpec, ...] = ()
    """Planned faults."""
    expect: ExpectSpec = field(default_factory=ExpectSpec)
    """Conditions besides equality with the reference."""
