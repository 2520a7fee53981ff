"""Records of one case: frozen, no behaviour, no third-party import.

The string under each field is its one description: the JSON Schema and the command line read it.
Checks that need more than one field live in `zero_sim.scenario.rules`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, NewType

ModelName = Literal[
    "mlp",
    "params",
    "transformer-260",
    "digits",
    "unusual",
    "moe",
    "fp8",
    "bit-hash",
    "ternary",
    "tp-block",
    "positional",
    "gpt",
    "multi-token",
]
OwnModelName = NewType("OwnModelName", str)
"""`own:NAME`, for the model that a target has under NAME in its `models`."""
AnyModelName = ModelName | OwnModelName
DtypeName = Literal["fp32", "bf16", "fp16"]
Recompute = Literal["none", "reentrant", "non-reentrant"]
OptimizerName = Literal[
    "adamw",
    "adam",
    "sgd",
    "rmsprop",
    "adagrad",
    "nadam",
    "radam",
    "adamax",
    "adadelta",
    "asgd",
    "rprop",
    "muon",
    "lamb",
    "own",
]
PartitionName = Literal["padded", "uneven", "rows", "one-owner"]
CheckpointForm = Literal["sharded", "consolidated"]
FaultName = Literal["crash", "stall", "corrupt", "drop", "duplicate", "slow"]
CollectiveName = Literal[
    "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_list", "all_gather",
    "all_gather_list", "broadcast", "scatter", "gather", "all_to_all", "all_to_all_list", "barrier",
]  # fmt: skip
OrderName = Literal[
    "linear", "linear-fp32", "tree", "ring", "gloo", "nccl-ring", "nccl-sym", "random-tree"
]

_FORBID: dict[str, object] = {"extra": "forbid", "use_attribute_docstrings": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class FreezeSpec:
    """Freeze one param for a span of steps; frozen, neither it nor its state may change."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    param: str
    """Name of the param."""
    start: int
    """First step, counted from 0, in which it is frozen."""
    stop: int
    """First step after that in which it is trained again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipSpec:
    """Let no loss read a bare param for a span of steps."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    param: str
    """Name of the param."""
    start: int
    """First step, counted from 0, in which no loss reads it."""
    stop: int
    """First step after that in which all losses read it again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OneRankSpec:
    """Let the loss of one rank alone read a bare param."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    param: str
    """Name of the param."""
    rank: int
    """The rank, counted in its dp-cp group."""
    micro_batch: int | None = None
    """Which of the rank's micro-batches alone, counted from 0; absent for each of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """The model that every rank trains."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    name: AnyModelName
    """`mlp`: residual MLP blocks; `params`: bare params of the given shapes; `transformer-260`: the
    260-parameter walkthrough; `digits`: a small network for the handwritten digits; `unusual`: one
    of each awkward kind of param: frozen, tied, used twice, unused, on one rank or in one
    micro-batch only, empty, strided, of a second dtype; `moe`: a mixture of experts with an fp32
    router, of which each rank holds its share; `fp8`: `mlp` with weight matrices in fp8 and a scale
    each. Two have a reduced gradient that no order of addition changes: `bit-hash`: bare params
    whose gradients depend on every bit of every param; `ternary`: a network of the usual layers
    that computes with small whole numbers. `tp-block`: blocks of attention and two layers, cut over
    tensor-parallel ranks, which compute with small whole numbers, too. `positional`:
    `weight * x + position`, whose terms share one gradient tensor; `gpt`: a small language model of
    torch's layers, with a tied head and a block used twice; `multi-token`: a language model with
    a second loss, which a system may scale by itself. `own:NAME`: a model that the target
    brings."""
    dtype: DtypeName = "fp32"
    """Dtype of the working params, and of the gradients of those in fp8; the optimizer always keeps
    fp32 masters."""
    hidden: int = 8
    """`mlp`, `fp8`, `digits`, `moe`, `ternary`, `tp-block`, `positional`, `gpt`, `multi-token`:
    width of a block; the inner layer of an `mlp` block is four times as wide, that of `ternary` and
    `tp-block` twice."""
    blocks: int = 2
    """`mlp`, `fp8`, `tp-block` and `gpt`: number of residual blocks."""
    experts: int = 4
    """`moe`: number of experts on all ranks together; `topology.ep` divides it."""
    fp8_format: Literal["e4m3", "e5m2", "mixed"] = "mixed"
    """`fp8`: format of the weight matrices; `mixed`: e4m3 into the inner layer of each block, e5m2
    out of it."""
    shapes: tuple[tuple[int, ...], ...] | None = None
    """`params`, `bit-hash`: one shape per param, in registration order; a zero makes an
    empty param. Other models leave it out."""
    nested: bool = False
    """`params`: whether each param is in a child module of its own, `p0` as `m0.p0`. Other fields
    that list bare params call it `p0` all the same; `freeze` has its whole name."""
    tied: tuple[str, ...] = ()
    """`params`: names of params that are tied: another module of the model, `again`, has each of
    them, too, under a second name such as `again.p0`, and the loss reads it at both places."""
    tied_first: bool = False
    """With `tied`: whether the loss reads the second names before all others."""
    unused: tuple[str, ...] = ()
    """`params`: names of params that no loss reads, so that backward gives them no gradient."""
    skip: tuple[SkipSpec, ...] = ()
    """`params`: params that no loss reads for some steps, so that backward gives them no gradient
    in these; nested, their modules are not called."""
    one_rank: tuple[OneRankSpec, ...] = ()
    """`params`: params that the loss of one rank alone reads, or that of one micro-batch of it, so
    that backward of all others gives them no gradient."""
    freeze: tuple[FreezeSpec, ...] = ()
    """Params that are frozen for some steps and not for others."""
    buffer: Literal["none", "saved", "rebuilt"] = "none"
    """Whether the module has a buffer `gain`, drawn from the seed, by which forwards multiply their
    outputs. `saved`: a persistent one; the module that is built for a load begins with another
    value of it, so that a checkpoint must carry it. `rebuilt`: one that is not persistent, which no
    checkpoint has and each process builds. Not for models of experts, of split layers, in fp8, with
    gradients that no order changes, or of a target's own."""
    recompute: Recompute = "none"
    """`mlp`, `gpt`, `moe`, `transformer-260`: kind of checkpoint, of `torch.utils.checkpoint`, that
    runs each block or expert again in backward; none to keep activations. Reentrant checkpoints
    leave out the block that `gpt` uses twice. The reference keeps activations."""
    distinct_start: bool = False
    """Whether every rank but the first that holds it begins with other values of each param and
    each buffer of the module: the system has to spread the first rank's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NanSpec:
    """Plant a NaN or an infinity in what one rank is fed at one step."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    step: int
    """Step, counted from 0."""
    rank: int
    """Rank of which a micro-batch of that step holds it."""
    value: Literal["nan", "inf"] = "nan"
    """What to plant."""
    micro_batch: int = 0
    """Which of the rank's micro-batches of that step, counted from 0."""
    element: int = 0
    """Which element of that micro-batch's inputs, counted from 0 and, past the last one, from the
    first again. Inputs of bare params are factors of their elements: what is not finite stays in
    the gradient of one param."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """What the ranks are fed."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    ranks: Literal["distinct", "same"] = "distinct"
    """`distinct`: each rank has its own data; `same`: all ranks see rank 0's, on purpose."""
    rows: int = 4
    """Rows (samples) of one micro-batch on one rank."""
    uneven_rows: bool = False
    """Rank r gets r % 3 rows more, so that ranks contribute unequal numbers of rows."""
    epoch_steps: int | None = None
    """Steps of an epoch, whose last step has short micro-batches on every rank, as where a loader
    does not drop the last batch: with half of `rows`, rounded down. Absent where each step has as
    many rows."""
    loss: Literal["mean", "sum", "mean-of-ranks"] = "mean"
    """Whether a micro-batch's loss is a mean or a sum over its rows, or a mean that is divided by
    the number of ranks as well, before backward; but for `mean`, `mlp`, `fp8` and `params` only."""
    nan: NanSpec | None = None
    """Where to plant a NaN; absent for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldSpec:
    """The simulated cluster."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    size: int = 2
    """Number of ranks."""
    order: OrderName = "linear"
    """In which order, and how precisely, a reduction adds the ranks' contributions: by rank; by
    rank, 16-bit data in fp32; neighbours first; round a ring; as gloo, NCCL's ring or NCCL's
    symmetric-memory kernels do; or in binary trees drawn from the seed."""
    order_known: bool = True
    """Whether the judge is told that order. Where not, a sum has to lie within the bound that is
    proven from the ranks' gradients, and all that follows from it is owed bit for bit."""
    schedule: Literal["round-robin", "random", "pct"] = "round-robin"
    """Which runnable rank gets the baton next."""
    timing: Literal["eager", "lazy", "hostile"] = "eager"
    """When a collective reads and writes: as soon as all ranks came; as late as their waits allow;
    or anywhere between, drawn from the seed."""
    races: bool = False
    """Whether every tensor operation is checked against the memory in flight."""
    strict: bool = True
    """Whether what gloo accepts and NCCL does not is an error, too: tensors not contiguous,
    overlapping or of another shape than another rank's, buffers that two ranks exchanged, calls
    never waited for, groups used in different order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologySpec:
    """How the ranks are arranged; data-parallel ranks are what is left of `world.size`.

    Ranks that differ in `tp` or `pp` train different params, each set in a dp-cp group of its own.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    tp: int = 1
    """Tensor-parallel ranks."""
    cp: int = 1
    """Context-parallel ranks; they hold the same params as data-parallel ones."""
    pp: int = 1
    """Pipeline-parallel ranks."""
    ep: int = 1
    """Expert-parallel ways: the rank at place i of a dp-cp group holds the share i % ep of the
    experts, and sums their gradients with the ranks of the same share alone."""
    shared: tuple[str, ...] = ()
    """Params whose name ends with one of these are held whole by every tensor-parallel rank; the
    norm counts them on the first one alone."""
    tied: tuple[str, ...] = ()
    """Params whose name ends with one of these are tied over pipeline-parallel ranks; the norm
    counts them on the first one alone."""
    order: str = "tp-cp-dp-pp"
    """Axes from the one in which neighbouring ranks differ to the slowest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionSpec:
    """An option of the target's own, which no other field speaks of."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    name: str
    """Name of the option, as the target declares it."""
    value: str
    """Its value as text: `true`, `2.5`, `sum`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemSpec:
    """The system under test and how it is configured."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    target: str = "zero_sim"
    """Name of a registered target."""
    options: tuple[OptionSpec, ...] = ()
    """Options of the target's own that are not as by default."""
    stage: Literal[0, 1, 2, 3] = 1
    """ZeRO stage: 0 is plain data parallelism, 1 shards the optimizer state, 2 the gradients too, 3
    the params too."""
    divide: Literal["none", "pre", "post", "premul"] = "post"
    """How the sum becomes a mean: not at all; each rank divides its gradient before the sum, in the
    gradient's dtype; the sum is divided in fp32 after it; or each rank multiplies its gradient by
    the reciprocal, rounded to the gradient's dtype, before the sum."""
    divide_by: Literal["ranks", "micro-batches", "tokens"] = "ranks"
    """What it is divided by: the number of ranks; of micro-batches that all ranks had data for in
    the step; or of rows that they saw in it."""
    sync: Literal["last", "every"] = "last"
    """When ranks are summed: after the last micro-batch, on what each accumulated; or after every
    one, accumulating the sums."""
    redundancy: int = 1
    """Copies of what is sharded: the ranks are cut into so many blocks of consecutive ones, each of
    which holds all of it."""
    partition: PartitionName = "padded"
    """How a bucket becomes shards: even ones after padding; `uneven`, without padding, the first
    ones one element longer where it does not divide; `rows`, each param padded to whole rows of
    dim 0; `one-owner`, each bucket on one rank, dealt out in turn."""
    param_order: Literal["registration", "reverse"] = "registration"
    """In which order params lie in their buffer."""
    overlap_grads: bool | None = None
    """Whether gradients are reduced bucket by bucket while backward still runs; absent for where
    `bucket_elems` cuts buckets."""
    overlap_params: bool | None = None
    """Whether params are gathered bucket by bucket while the next forward already runs; absent for
    where `bucket_elems` cuts buckets and the stage is 1 or 2."""
    sum_by: Literal["reduce-scatter", "all-reduce", "first-rank"] = "reduce-scatter"
    """How gradients of a sharded bucket are summed: to each rank its shard; all of them to all
    ranks, of which each keeps its shard; or on the first rank, to which all send theirs and which
    sends the sum to all, the naive way, at stage 0 too."""
    gather_after_step: bool = False
    """With stage 3: whether params are gathered once more after the step, and freed."""
    reduce_buffer_elems: int | None = None
    """With stages 1 and 2: elements of the buffers into which gradients are copied as backward
    gives them, each owner's part of which is then reduced to it; one, or two in turn where
    `overlap_grads` is true. Longer gradients go by themselves. Absent for gradients that are
    reduced bucket by bucket."""
    contiguous_grads: bool = True
    """With `reduce_buffer_elems`: whether a gradient is copied when it comes; else those that go
    together are when the last of them is there, into new memory."""
    gather_chunk_elems: int | None = None
    """With stages 1 and 2: most elements, over all ranks, that one call gathers of a bucket; absent
    for all of it."""
    arena: bool = False
    """With stages 2 and 3: whether whole gradients, which come and go within a step, lie in memory
    that is taken once, so that none of them leaves a hole."""
    buffers_by: Literal["dtype", "param-group"] = "dtype"
    """What params of one flat buffer have in common: kind and dtype, or their group in
    `optimizer.groups` as well."""
    offload_state: bool = False
    """Whether fp32 masters and optimizer state are on the CPU, which takes the step, wherever the
    model is."""
    checkpoints: Literal["none", "whole", "split"] = "none"
    """With model `tp-block`, what is kept of a block between its forward and its backward: all that
    autograd wants; what it began with, so that backward runs it again; or this tensor-parallel
    rank's part of that, all-gathered first."""
    offload_checkpoints: bool = False
    """With `checkpoints`: whether they are kept on the CPU."""
    step_buffer_elems: int | None = None
    """Elements of the buffer through which gradients go as fp32, to be unscaled, measured, clipped
    and stepped, as many at a time as fit; a longer part of a param goes by itself. Absent for all
    that a rank owns at once."""
    prefetch: int | None = None
    """With stage 3: how many further buckets are gathered ahead of their use, forward and backward;
    absent for 1."""
    reshard_after_forward: bool = True
    """With stage 3: whether params are freed between a forward and its backward."""
    grad_dtype: Literal["param", "fp32"] = "param"
    """Dtype of the gradient buffer, in which micro-batches are accumulated and ranks are summed."""
    bucket_elems: int | None = None
    """Least number of elements after which a bucket is closed; absent for one bucket a buffer."""
    align_elems: int = 1
    """Every shard starts at a multiple of this many elements."""
    align_bytes: int = 1
    """Every shard starts at a multiple of this many bytes, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamGroupSpec:
    """A param group."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    match: str
    """Params whose name ends with this; the first group that matches wins."""
    lr: float | None = None
    """Learning rate; absent for the optimizer's."""
    weight_decay: float | None = None
    """Weight decay; absent for the optimizer's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaleSpec:
    """Dynamic loss scaling: the scale grows after finite steps and shrinks after others."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    initial: float = 1024.0
    """Scale of the first step; a power of two."""
    growth_interval: int = 2
    """Finite steps in a row after which the scale doubles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """The optimizer, with torch's own names and defaults."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    name: OptimizerName = "adamw"
    """Class of `torch.optim`; or `muon`, which makes matrices orthogonal, or `lamb`, which steps as
    far as a param is long: their step of an element depends on its whole param. `own` is the update
    rule that the target brings along; it may read any of the settings below."""
    lr: float = 1e-3
    """Learning rate."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to `lr`; 0 for a constant one."""
    betas: tuple[float, float] = (0.9, 0.999)
    """`adam`, `adamw`, `nadam`, `radam`, `adamax`, `lamb`: decay rates of the moments."""
    eps: float = 1e-8
    """Term added to the denominator, where the optimizer has one."""
    weight_decay: float = 0.0
    """Weight decay; not for `rprop`."""
    momentum: float = 0.0
    """`sgd`, `rmsprop`, `muon`: momentum."""
    nesterov: bool = False
    """`sgd`, `muon`: Nesterov momentum."""
    amsgrad: bool = False
    """`adam`, `adamw`: keep the largest second moment."""
    foreach: bool = False
    """Whether the system under test steps with torch's foreach kernels; the reference does so on
    other devices than the CPU alone, where they round otherwise than the loop."""
    groups: tuple[ParamGroupSpec, ...] = ()
    """Param groups with settings of their own; params that no group names keep those above."""
    clip_norm: float | None = None
    """Scale gradients down so that their norm over all params is at most this."""
    clip_value: float | None = None
    """Clamp every gradient element to this magnitude."""
    loss_scale: LossScaleSpec | None = None
    """Dynamic loss scaling; absent for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """How long to train, and from which seed."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    steps: int = 3
    """Optimizer steps."""
    micro_batches: int = 1
    """Micro-batches accumulated on each rank before a step."""
    own_micro_batches: tuple[int, ...] = ()
    """For how many of these a rank has data: rank r in step s for the first so many as entry r + s
    says, round and round; it joins the others with gradients of zero. Empty where each rank has
    data for all."""
    evaluate: Literal["never", "between-steps", "within-step"] = "never"
    """When each rank runs a forward under `no_grad`, on its first micro-batch of the step:
    `between-steps`, before `zero_grad`; or `within-step`, after the last backward and before the
    optimizer steps. Its loss must be that of the forward that is trained on."""
    seed: int = 0
    """Seed of weights, data, schedule, faults and every rank's random numbers."""
    stall_seconds: float = 60.0
    """How long the system may compute on one rank without calling torch.distributed while others
    wait; the judge's own time does not count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectSpec:
    """What must hold besides equality with the reference."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    accuracy_min: float | None = None
    """Held-out accuracy to reach after the last step, 0 to 1; only for models with held-out
    data."""
    nonzero_min: float = 0.25
    """Least fraction of gradient elements that must be nonzero in some step, so that a pass means
    something."""
    one_device: bool = False
    """Whether the reduced gradient must be, bit for bit, that of one device which saw the data of
    all ranks once: what is often said of ranks that all see the same data, and true only of some
    numbers of ranks."""
    finding: str | None = None
    """The check that must find something, such as `equality.grad`, or the area of checks, such as
    `equality`: the case passes if it is among the findings of the first bad step, and fails
    otherwise. Absent where nothing is to be found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultSpec:
    """Something that goes wrong on one rank by plan, to see that it is noticed."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    kind: FaultName
    """`crash`: the rank raises at a call; `stall`: it never comes to it; `corrupt`: one bit of one
    element that it sends or receives is flipped; `drop`: what it sends is lost; `duplicate`: what
    it sends counts twice in a reduction, and arrives in the next rank's place too in a gather;
    `slow`: in the whole run it gets the baton only where no other rank can run."""
    rank: int
    """Rank in the world."""
    call: int = 0
    """Which of the rank's own collectives, counted from 0; with `at = "random"`, the first that may
    be drawn. Not for `slow`."""
    at: Literal["call", "random"] = "call"
    """Whether the call is the stated one or drawn from the seed."""
    call_stop: int | None = None
    """With `at = "random"`: one past the last call that may be drawn."""
    collective: CollectiveName | None = None
    """Count only the rank's calls of this kind; absent for all."""
    side: Literal["send", "receive"] = "send"
    """`corrupt`: whether what the rank contributes is changed, or what it receives."""
    element: int | None = None
    """`corrupt`: which element of what it sends or receives, from 0; absent to draw one."""
    bit: int | None = None
    """`corrupt`: which bit, from 0, the least significant one; absent to draw one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReloadSpec:
    """Save a checkpoint, and go on from it in another world with another layout.

    What is left out stays as it was.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    step: int
    """Steps done before the checkpoint is saved."""
    async_steps: int = 0
    """Steps trained while it is written, none of which it has: they are trained again after it; 0
    where training waits for it."""
    form: CheckpointForm = "sharded"
    """One file a rank, or one file with whole params."""
    lost_steps: int = 0
    """Steps that the engine which loads it has trained before the load, whose gradients it still
    has; nothing of them may be left. 0 where no engine was there before."""
    lost_micro_batches: int = 0
    """Micro-batches that this engine has trained besides, of a step that it does not end."""
    early_save: bool = False
    """Whether the engine saves a checkpoint before its first step, too, which is never loaded."""
    weights_only: bool = False
    """Whether only the masters, working params and persistent buffers are taken from it: optimizer
    state and loss scale begin anew."""
    world_size: int | None = None
    """Number of ranks after it."""
    stage: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage after it."""
    ep: int | None = None
    """Expert-parallel ways after it."""
    redundancy: int | None = None
    """Copies of the sharded state after it."""
    bucket_elems: int | None = None
    """Bucket size after it."""
    partition: PartitionName | None = None
    """Partition after it."""
    param_order: Literal["registration", "reverse"] | None = None
    """Order of params after it."""
    reduce_buffer_elems: int | None = None
    """Elements of the reduce buffers after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSpec:
    """Compare with a second layout, which the target declares to give the same state.

    The second layout runs first. After every step, the case's params and optimizer state must have
    its bits. What is left out is as in the case.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    world_size: int | None = None
    """Number of ranks in the second layout."""
    stage: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage in the second layout."""
    redundancy: int | None = None
    """Copies of what is sharded, in the second layout."""
    bucket_elems: int | None = None
    """Bucket size in the second layout."""
    partition: PartitionName | None = None
    """Partition in the second layout."""
    param_order: Literal["registration", "reverse"] | None = None
    """Param order in the second layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One case, complete: enough to build it, run it and judge it."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    schema: Literal[1]
    """Version of this format."""
    name: str = ""
    """Case id; the file's stem, with the matrix's values behind it, where left out."""
    description: str = ""
    """What the case shows, in a sentence."""
    model: ModelSpec
    """The model that every rank trains."""
    data: DataSpec = field(default_factory=DataSpec)
    """What the ranks are fed."""
    world: WorldSpec = field(default_factory=WorldSpec)
    """The simulated cluster."""
    topology: TopologySpec = field(default_factory=TopologySpec)
    """How the ranks are arranged."""
    system: SystemSpec = field(default_factory=SystemSpec)
    """The system under test."""
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    """The optimizer."""
    run: RunSpec = field(default_factory=RunSpec)
    """How long to train, and from which seed."""
    reload: ReloadSpec | None = None
    """Save and reload in the middle; absent for none."""
    pair: PairSpec | None = None
    """A second layout to compare with; absent for none."""
    faults: tuple[FaultSpec, ...] = ()
    """What goes wrong by plan."""
    expect: ExpectSpec = field(default_factory=ExpectSpec)
    """What must hold besides equality with the reference."""
