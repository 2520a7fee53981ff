"""The configuration of the ZeRO engine: one frozen record that all its layers read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from zero_sim.errors import UsageError
from zero_sim.layout import ParamOrder, PartitionRule
from zero_sim.zero.sharding import STAGES, Sharding, Stage, sharding_of

Divide = Literal["none", "pre", "post", "premul"]
DivideBy = Literal["ranks", "micro-batches", "tokens"]
Sync = Literal["last", "every"]
GradDtype = Literal["param", "fp32"]
SumBy = Literal["reduce-scatter", "all-reduce", "first-rank"]


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
    micro-batches, or of those that ranks had data for, with `joins`; or the rows that all ranks
    counted with `add_rows`."""
    sync: Sync = "last"
    """When ranks are summed: once, after the last micro-batch; or after every one, adding up the
    sums in the gradient's dtype."""
    micro_batches: int | None = None
    """Micro-batches of a step. Needed only where the division comes before the first of several
    sums and depends on it; checked wherever given."""
    joins: bool = False
    """Whether a rank may have no data for some micro-batches, and joins these with zeros
    (`join_micro_batch`). `divide_by="micro-batches"` then counts those that ranks had data for."""
    redundancy: int = 1
    """Copies of all that is sharded: blocks of consecutive ranks that hold one each."""
    grad_dtype: GradDtype = "param"
    """Dtype in which gradients are accumulated and summed: the param's own (of an fp8 param, its
    `grad_dtype`), or fp32."""
    bucket_elems: int | None = 40_000_000
    """A bucket closes once it holds at least this many elements; None for one bucket a buffer. The
    default is that of Megatron-LM."""
    align_elems: int = 1
    """Every shard starts at a multiple of this many elements."""
    align_bytes: int = 1
    """Every shard starts at a multiple of this many bytes of the working param, too."""
    param_order: ParamOrder = "registration"
    """Order of params in a buffer."""
    partition: PartitionRule = "padded"
    """Which rank owns what of a unit; see `zero_sim.layout.partition`."""
    overlap_grads: bool = True
    """Whether a bucket is reduced while backward runs, as soon as its gradients are there: in a
    backward after `begin_last_micro_batch`."""
    overlap_params: bool = False
    """Whether params are gathered while the next forward runs, each waited for before its use. Not
    by default: until then whoever reads a param otherwise than by a forward reads an old one."""
    sum_by: SumBy = "reduce-scatter"
    """How gradients of a unit that is sharded are summed: to each rank its shard; or all of them to
    all ranks, which then keep their shard, as some libraries do, and which sends as much again; or
    on the first rank, to which all send theirs and which sends the sum to all, the naive way."""
    gather_after_step: bool = False
    """With sharded params: whether each unit is gathered once after the step, too, and freed, as
    the figure of ZeRO's paper has it. Nobody needs it; it sends P more."""
    reduce_buffer_elems: int | None = None
    """With whole params: the length of the buffers into which gradients are copied as backward
    gives them, and out of which each owner's are reduced to it: one, or with `overlap_grads` two
    that take turns. A longer gradient goes by itself. None where gradients are reduced in the units
    of their params."""
    contiguous_grads: bool = True
    """With `reduce_buffer_elems`: whether each gradient is copied when it comes; where False, all
    that go together are when the last of them is there, into new memory."""
    gather_chunk_elems: int | None = None
    """With whole params: most elements that one call gathers, over all ranks; None for all of a
    unit."""
    arena: bool = False
    """With sharded gradients: whether whole ones, which come and go, lie in memory that is taken
    once; see `zero_sim.zero.variants.arena`."""
    prefetch: int = 1
    """With sharded params: how many further units are gathered ahead, forward and backward."""
    reshard_after_forward: bool = True
    """With sharded params: whether they are freed between a forward and its backward, all but the
    last unit."""
    broadcast_params: bool = True
    """Whether group rank 0's params and module buffers replace all others' at construction; where
    False, the caller vouches that every rank built the same bits."""

    def __post_init__(self) -> None:
        choices = {
            "divide": Divide, "divide_by": DivideBy, "sync": Sync,
            "grad_dtype": GradDtype, "sum_by": SumBy,
        }  # fmt: skip
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
        for name in ("reduce_buffer_elems", "gather_chunk_elems"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(
                    f"expected {name} to be an integer of at least 1, or None, got {value!r}."
                )
        self._check_unused()
        self._check_buffers()
        if self.sum_by == "all-reduce" and not self.sharding.state:
            raise UsageError(
                "expected sum_by='reduce-scatter' with stage=0, which shards nothing and sums to "
                "all ranks by itself, got 'all-reduce'. Try leaving it out, or 'first-rank'."
            )
        self._check_count_is_known()

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
        unused: dict[str, object] = {}
        if not sharding.state:
            unused |= {"redundancy": 1, "partition": "padded"}
            unused |= {"overlap_params": False}
        if sharding.params or not sharding.state:
            unused |= {"reduce_buffer_elems": None, "gather_chunk_elems": None}
        if not sharding.grads:
            unused |= {"arena": False}
        if sharding.params:
            unused |= {"overlap_params": False}
        else:
            unused |= {"prefetch": 1, "reshard_after_forward": True, "gather_after_step": False}
        for name, default in unused.items():
            value = getattr(self, name)
            if value != default:
                why = "shards nothing" if not sharding.state else "gathers params as they are used"
                if name in ("prefetch", "reshard_after_forward", "gather_after_step"):
                    why = "keeps params whole"
                if name == "arena":
                    why = "keeps gradients whole in memory that stays"
                raise UsageError(
                    f"expected {name}={default!r} with stage={stage}, which {why}, "
                    f"got {value!r}. Try leaving it out, or another stage."
                )

    def _check_buffers(self) -> None:
        """Refuse what reduce buffers and chunks do not go with."""
        if self.arena and self.reduce_buffer_elems is not None:
            raise UsageError(
                "expected arena=False with reduce_buffer_elems, as gradients do not fill units of "
                "their params then, got True. Try leaving either out."
            )
        if self.reduce_buffer_elems is None:
            if not self.contiguous_grads:
                raise UsageError(
                    "expected reduce_buffer_elems with contiguous_grads=False, which says when "
                    "gradients are copied into such buffers, got None. Try leaving it out."
                )
        elif self.sum_by == "first-rank":
            raise UsageError(
                "expected sum_by='reduce-scatter' or 'all-reduce' with reduce_buffer_elems, got "
                "'first-rank'. Try leaving either out."
            )
        elif self.redundancy > 1:
            raise UsageError(
                f"expected redundancy=1 with reduce_buffer_elems, whose sums end with one owner "
                f"and go on to no copies, got {self.redundancy}. Try leaving either out."
            )
        elif self.sharding.grads and self.sync == "last":
            raise UsageError(
                "expected sync='every' with reduce_buffer_elems and stage=2, where gradients leave "
                "as backward goes and none stays for the next micro-batch, got 'last'. Try "
                "stage=1, or sync='every'."
            )
        if self.gather_chunk_elems is not None and self.overlap_params:
            raise UsageError(
                "expected overlap_params=False with gather_chunk_elems, as one chunk's memory "
                "serves all of them in turn, got True. Try leaving either out."
            )
        if self.gather_chunk_elems is not None and self.partition == "one-owner":
            raise UsageError(
                "expected partition='padded', 'uneven' or 'rows' with gather_chunk_elems, of which "
                "every rank has a stretch, got 'one-owner'. Try bucket_elems for smaller units."
            )

    def _check_count_is_known(self) -> None:
        """Refuse a division that would need the end of the step at its beginning."""
        if not (self.divides_before_sum and self.sync == "every"):
            return
        if self.divide_by == "tokens" or (self.joins and self.divide_by == "micro-batches"):
            what = "rows" if self.divide_by == "tokens" else "micro-batches that had data"
            raise UsageError(
                f"expected a divisor that is known before the first sum, got "
                f"divide={self.divide!r}, sync='every', divide_by={self.divide_by!r}: the {what} "
                f"are counted only after the last micro-batch. Try divide='post' or sync='last'."
            )
        if self.divide_by == "micro-batches" and self.micro_batches is None:
            raise UsageError(
                f"expected micro_batches to be given with divide={self.divide!r}, sync='every', "
                f"divide_by='micro-batches', as the first sum is divided by it already, got "
                f"None."
            )
