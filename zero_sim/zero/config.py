"""The engine's configuration: a frozen record that all layers share."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, get_args

from zero_sim.errors import UsageError
from zero_sim.layout import LayoutPolicy
from zero_sim.zero.sharding import STAGES, Sharding, Stage, sharding_of

Divide = Literal["none", "pre", "post", "premul"]
DivideBy = Literal["ranks", "micro-batches", "tokens"]
Sync = Literal["last", "every"]
GradDtype = Literal["param", "fp32"]

# The default of Megatron-LM.
_LAYOUT = LayoutPolicy(bucket_elems=40_000_000)


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """Stage, numerics and layout; equal on every rank.

    Raises:
        UsageError: If a field has an invalid value. Sizes are checked when the layout is planned.
    """

    stage: Stage = 1
    """Sharded memory. 0: none (plain data parallelism); 1: the optimizer state; 2: gradients too;
    3: params too."""
    divide: Divide = "post"
    """Conversion from the sum over ranks to a mean. `none`: no conversion. `pre`: each rank divides
    before the sum, in the gradient dtype. `post`: divide the sum in fp32. `premul`: before the sum,
    each rank multiplies by the reciprocal, rounded to the gradient dtype."""
    divide_by: DivideBy = "ranks"
    """Divisor, unless you pass a count to `finish_grad_sync`: the number of ranks, ranks times
    micro-batches, or all rows counted with `add_rows`."""
    sync: Sync = "last"
    """Time of the sum over ranks. `last`: once, after the last micro-batch. `every`: after each
    micro-batch; the sums are added up in the gradient dtype."""
    micro_batches: int | None = None
    """Micro-batches per step. If given, this number is checked. Required only if
    `divide_by="micro-batches"` and the first division comes before the last micro-batch."""
    redundancy: int = 1
    """Replicas of the sharded state, each on a shard group of consecutive ranks."""
    grad_dtype: GradDtype = "param"
    """Dtype for accumulating and summing gradients: `fp32`, or `param` for the dtype that autograd
    returns, which is the param's `grad_dtype` if set."""
    layout: LayoutPolicy = _LAYOUT
    """Placement of params into buffers, buckets and shards. The groups determine the number of
    shards, so leave it at 1 here. Default: buckets of 40 million elements, as in Megatron-LM."""
    overlap_grads: bool = True
    """True to reduce a bucket during backward, as soon as its gradients are complete. Applies to a
    backward after `begin_last_micro_batch`."""
    overlap_params: bool = False
    """True to gather params during the next forward; each module waits for its own params."""
    # Off by default: code that reads a param outside a forward would read its old value.
    prefetch: int = 1
    """Number of units to gather ahead, in forward and backward; for sharded params."""
    reshard_after_forward: bool = True
    """True to reshard params between forward and backward, except in the last unit; for sharded
    params."""

    def __post_init__(self) -> None:
        choices = {
            "divide": Divide,
            "divide_by": DivideBy,
            "sync": Sync,
            "grad_dtype": GradDtype,
        }
        for name, literal in choices.items():
            value = getattr(self, name)
            # True equals 1, so booleans must be excluded by type.
            if isinstance(value, bool) or value not in get_args(literal):
                expected = ", ".join(map(repr, get_args(literal)))
                raise UsageError(f"expected {name} to be one of {expected}, got {value!r}.")
        if isinstance(self.stage, bool) or self.stage not in STAGES:
            expected = ", ".join(map(repr, STAGES))
            raise UsageError(f"expected stage to be one of {expected}, got {self.stage!r}.")
        if type(self.prefetch) is not int or self.prefetch < 0:
            raise UsageError(
                f"expected prefetch to be an integer of at least 0, got {self.prefetch!r}."
            )
        for name in ("redundancy", "micro_batches"):
            value = getattr(self, name)
            # type(), because bool is a subclass of int.
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"expected {name} to be an integer of at least 1, got {value!r}.")
        # A setting without effect is a mistake, so it is an error too.
        self._check_unused()
        # In this case the first sum comes before the step ends, so it needs its divisor early.
        if self.divides_before_sum and self.sync == "every":
            self._check_counts()

    @property
    def divides_before_sum(self) -> bool:
        """True if a rank needs the divisor before its gradients are summed."""
        return self.divide in ("pre", "premul")

    @property
    def sharding(self) -> Sharding:
        """The sharded memory at this stage."""
        return sharding_of(self.stage)

    def _check_unused(self) -> None:
        """Refuse settings without effect at this stage."""
        sharding, stage = self.sharding, self.stage
        if self.layout.shard_count != 1:
            raise UsageError(
                f"expected layout.shard_count=1, because the groups determine the number of "
                f"shards, got {self.layout.shard_count}. Remove shard_count."
            )
        unused: dict[str, object] = {}
        if not sharding.state:
            unused |= {"redundancy": 1, "layout.partition": "padded", "overlap_params": False}
        # Gathers on use overlap by `prefetch` instead.
        if sharding.params:
            unused |= {"overlap_params": False}
        else:
            # Unsharded params are neither gathered on use nor resharded.
            unused |= {"prefetch": 1, "reshard_after_forward": True}
        for name, default in unused.items():
            value = attrgetter(name)(self)
            if value != default:
                why = "shards nothing" if not sharding.state else "gathers params as they are used"
                if name in ("prefetch", "reshard_after_forward"):
                    why = "keeps params unsharded"
                raise UsageError(
                    f"expected {name}={default!r} with stage={stage}, which {why}, "
                    f"got {value!r}. Remove it, or choose another stage."
                )

    def _check_counts(self) -> None:
        """Refuse a divisor for the first sum that is not known before the step ends."""
        self.check_counted_in_time("tokens", "rows")
        if self.divide_by == "micro-batches" and self.micro_batches is None:
            raise UsageError(
                f"expected micro_batches with divide={self.divide!r}, sync='every', "
                f"divide_by='micro-batches', because it divides the first sum already, got "
                f"None."
            )

    def check_counted_in_time(self, by: DivideBy, what: str) -> None:
        """Refuse to divide before the first sum by a count that needs the whole step.

        Args:
            by: The `divide_by` with that count.
            what: The counted things, for the message.

        Raises:
            UsageError: If `divide_by` is `by`.
        """
        if self.divide_by == by:
            raise UsageError(
                f"expected a divisor known before the first sum, got "
                f"divide={self.divide!r}, sync='every', divide_by={self.divide_by!r}: the {what} "
                f"are counted only after the last micro-batch. Use divide='post' or sync='last'."
            )
