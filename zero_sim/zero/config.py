"""The configuration of the ZeRO engine: one frozen record that all its layers read."""

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

_LAYOUT = LayoutPolicy(bucket_elems=40_000_000)


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """Stage, numerics and layout of one engine; the same on every rank.

    Raises:
        UsageError: If a field has no such value. Sizes are checked when the layout is planned.
    """

    stage: Stage = 1
    """0: every rank keeps all (plain data parallelism); 1: each keeps a shard of the optimizer
    state, 2: of the gradients too, 3: of the params too."""
    divide: Divide = "post"
    """How the sum over ranks becomes a mean: not at all; each rank divides before the sum, in the
    gradient's dtype; the sum is divided in fp32 after it; or each rank multiplies before the sum by
    the reciprocal, rounded to the gradient's dtype."""
    divide_by: DivideBy = "ranks"
    """What it is divided by, unless `finish_grad_sync` is told: the number of ranks; of ranks times
    micro-batches; or the rows that all ranks
    counted with `add_rows`."""
    sync: Sync = "last"
    """When ranks are summed: once, after the last micro-batch; or after every one, adding up the
    sums in the gradient's dtype."""
    micro_batches: int | None = None
    """Micro-batches of a step. Needed only where the division comes before the first of several
    sums and depends on it; checked wherever given."""
    redundancy: int = 1
    """Copies of all that is sharded: blocks of consecutive ranks that hold one each."""
    grad_dtype: GradDtype = "param"
    """Dtype in which gradients are accumulated and summed: the param's own (its `grad_dtype`
    if that is set), or fp32."""
    layout: LayoutPolicy = _LAYOUT
    """Placement of params into buffers, buckets and shards. The default bucket is that of
    Megatron-LM. The number of shards follows from the groups, so it is not set here."""
    overlap_grads: bool = True
    """Whether a bucket is reduced while backward runs, as soon as its gradients are there: in a
    backward after `begin_last_micro_batch`."""
    overlap_params: bool = False
    """Whether params are gathered while the next forward runs, each waited for before its use. Not
    by default: until then whoever reads a param otherwise than by a forward reads an old one."""
    prefetch: int = 1
    """With sharded params: how many further units are gathered ahead, forward and backward."""
    reshard_after_forward: bool = True
    """With sharded params: whether they are freed between a forward and its backward, all but the
    last unit."""

    def __post_init__(self) -> None:
        choices = {
            "divide": Divide,
            "divide_by": DivideBy,
            "sync": Sync,
            "grad_dtype": GradDtype,
        }
        for name, literal in choices.items():
            value = getattr(self, name)
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
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"expected {name} to be an integer of at least 1, got {value!r}.")
        self._check_unused()
        if self.divides_before_sum and self.sync == "every":
            self._check_counts()

    @property
    def divides_before_sum(self) -> bool:
        """Whether a rank has to know the divisor before its gradients are summed."""
        return self.divide in ("pre", "premul")

    @property
    def sharding(self) -> Sharding:
        """What each rank keeps a part of."""
        return sharding_of(self.stage)

    def _check_unused(self) -> None:
        """Refuse settings of what this stage does not do."""
        sharding, stage = self.sharding, self.stage
        if self.layout.shard_count != 1:
            raise UsageError(
                f"expected a layout whose shard_count is left at 1, since the groups have as many "
                f"shards as ranks, got {self.layout.shard_count}. Remove shard_count."
            )
        unused: dict[str, object] = {}
        if not sharding.state:
            unused |= {"redundancy": 1, "layout.partition": "padded", "overlap_params": False}
        if sharding.params:
            unused |= {"overlap_params": False}
        else:
            unused |= {"prefetch": 1, "reshard_after_forward": True}
        for name, default in unused.items():
            value = attrgetter(name)(self)
            if value != default:
                why = "shards nothing" if not sharding.state else "gathers params as they are used"
                if name in ("prefetch", "reshard_after_forward"):
                    why = "keeps params whole"
                raise UsageError(
                    f"expected {name}={default!r} with stage={stage}, which {why}, "
                    f"got {value!r}. Try leaving it out, or another stage."
                )

    def _check_counts(self) -> None:
        """Refuse a divisor of the first sum that would need the end of the step."""
        self.check_counted_in_time("tokens", "rows")
        if self.divide_by == "micro-batches" and self.micro_batches is None:
            raise UsageError(
                f"expected micro_batches to be given with divide={self.divide!r}, sync='every', "
                f"divide_by='micro-batches', as the first sum is divided by it already, got "
                f"None."
            )

    def check_counted_in_time(self, by: DivideBy, what: str) -> None:
        """Refuse to divide before the first sum by a count that ends with the last micro-batch.

        Args:
            by: The `divide_by` of that count.
            what: What is counted.

        Raises:
            UsageError: If the config divides by it.
        """
        if self.divide_by == by:
            raise UsageError(
                f"expected a divisor that is known before the first sum, got "
                f"divide={self.divide!r}, sync='every', divide_by={self.divide_by!r}: the {what} "
                f"are counted only after the last micro-batch. Try divide='post' or sync='last'."
            )
