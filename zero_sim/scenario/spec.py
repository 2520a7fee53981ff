"""What one case is: frozen records, no behaviour, no third-party import.

The string under each field is its one description: the JSON Schema and the command line read it.
Checks that need more than one field live in `zero_sim.scenario.rules`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

ModelName = Literal["mlp", "params", "transformer-260", "digits"]
DtypeName = Literal["fp32", "bf16"]
OrderName = Literal["linear", "linear-fp32", "ring", "tree"]

_FORBID: dict[str, object] = {"extra": "forbid", "use_attribute_docstrings": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """The model that every rank trains."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    name: ModelName
    """`mlp`: residual MLP blocks; `params`: bare params of the given shapes; `transformer-260`: the
    260-parameter walkthrough; `digits`: a small network for the handwritten digits."""
    dtype: DtypeName = "fp32"
    """Dtype of the working params; the optimizer always keeps fp32 masters."""
    hidden: int = 8
    """`mlp` and `digits`: width of a block; the inner layer of an `mlp` block is four times as
    wide."""
    blocks: int = 2
    """`mlp`: number of residual blocks."""
    shapes: tuple[tuple[int, ...], ...] | None = None
    """`params`: one shape per param, in registration order; a zero makes an empty param. Other
    models leave it out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NanSpec:
    """Plant a NaN in the input of one rank at one step, to see it named."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    step: int
    """Step, counted from 0."""
    rank: int
    """Rank whose first micro-batch of that step holds the NaN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """What the ranks are fed."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    ranks: Literal["distinct", "same"] = "distinct"
    """`distinct`: each rank has its own data; `same`: all ranks see rank 0's, on purpose."""
    rows: int = 4
    """Rows (samples) of one micro-batch on one rank."""
    nan: NanSpec | None = None
    """Where to plant a NaN; absent for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldSpec:
    """The simulated cluster."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    size: int = 2
    """Number of ranks."""
    order: OrderName = "linear"
    """In which order, and how precisely, a reduction adds the ranks' contributions."""
    schedule: Literal["round-robin", "random"] = "round-robin"
    """Which runnable rank gets the baton next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemSpec:
    """The system under test and how it is configured."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    target: str = "zero_sim"
    """Name of a registered target."""
    stage: Literal[0, 1] = 1
    """ZeRO stage: 0 is plain data parallelism, 1 shards the optimizer state."""
    divide: Literal["none", "pre", "post"] = "post"
    """How the sum over ranks becomes a mean: not at all; each rank divides its gradient by the
    world size before the sum, in the gradient's dtype; or the sum is divided in fp32 after it."""
    grad_dtype: Literal["param", "fp32"] = "param"
    """Dtype of the gradient buffer, in which micro-batches are accumulated and ranks are summed."""
    bucket_elems: int | None = None
    """Least number of elements after which a bucket is closed; absent for one bucket a buffer."""
    align_elems: int = 1
    """Every shard starts at a multiple of this many elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """The optimizer, with torch's own names and defaults."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    """Class of `torch.optim`."""
    lr: float = 1e-3
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """`adam`, `adamw`: decay rates of the moments."""
    eps: float = 1e-8
    """`adam`, `adamw`: term added to the denominator."""
    weight_decay: float = 0.0
    """Weight decay."""
    momentum: float = 0.0
    """`sgd`: momentum."""
    foreach: bool = False
    """Whether the system under test steps with torch's foreach kernels; the reference never
    does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """How long to train, and from which seed."""

    __pydantic_config__: ClassVar[dict[str, object]] = _FORBID

    steps: int = 3
    """Optimizer steps."""
    micro_batches: int = 1
    """Micro-batches accumulated on each rank before a step."""
    seed: int = 0
    """Seed of weights, data, schedule and every rank's random numbers."""


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
    system: SystemSpec = field(default_factory=SystemSpec)
    """The system under test."""
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    """The optimizer."""
    run: RunSpec = field(default_factory=RunSpec)
    """How long to train, and from which seed."""
    expect: ExpectSpec = field(default_factory=ExpectSpec)
    """What must hold besides equality with the reference."""
