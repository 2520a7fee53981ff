"""Conditions on several fields.

A row contains the fields that it reads, and the problem to report if it is broken. Settings that
need other settings are in `zero_sim.scenario.applies`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from zero_sim.errors import Problem
from zero_sim.scenario.derived import (
    counts_over_ranks,
    group_rank_of,
    own_micro_batches,
    world_size_at,
)
from zero_sim.scenario.fields import default_at, describe_value
from zero_sim.scenario.fitting import orders_axes
from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.spec import Scenario, TopologySpec
from zero_sim.scenario.tp_block import HEAD_ELEMS, SHARED, is_exact, is_tp_block, splits_heads

# Sorted, for comparison with the sorted axes in `topology.order`.
_AXES = ["cp", "dp", "pp", "tp"]
_LOSS_SCALE_MAX = 2.0**64
_UNITS = {"bf16": 2**8, "fp16": 2**11}
"""Units that a 16-bit dtype adds exactly. Each micro-batch on each rank adds one unit."""
UNBOUNDED_MODELS = ("moe", "fp8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """A combination of values that is refused."""

    reads: tuple[str, ...]
    """Paths of all fields that the condition reads. The problem is reported at the first."""
    broken: Callable[[Scenario], bool]
    message: str
    """Expected values. `{got}` is replaced by the first field's value."""
    suggestion: str
    holds_after: bool = False
    """True if the case after its checkpoint is also checked."""

    def check(self, scenario: Scenario) -> Iterator[Problem]:
        """Yield a problem if the condition is broken."""
        if self.broken(scenario):
            value = describe_value(attrgetter(self.reads[0])(scenario))
            yield Problem(
                path=self.reads[0],
                message=self.message.format(got=value),
                suggestion=self.suggestion,
            )


def _power_of_two(value: float) -> bool:
    # The mantissa of frexp is in [0.5, 1), and exactly 0.5 for powers of two.
    return 1 <= value <= _LOSS_SCALE_MAX and math.frexp(value)[0] == 0.5


def _parts(scenario: Scenario) -> int:
    # Number of dp-cp groups. Not cp, because CP ranks train the same params as DP ranks. At least
    # 1, because an invalid case must not raise.
    return max(scenario.topology.tp, 1) * max(scenario.topology.pp, 1)


def _dp_cp_size(scenario: Scenario) -> int:
    return scenario.world.size // _parts(scenario)


def _reload_splits(scenario: Scenario) -> bool:
    """Return True if the world after a reload divides into all groups and replicas."""
    if scenario.reload is None:
        return True
    reload, topology = scenario.reload, scenario.topology
    size = reload.world_size or scenario.world.size
    ep = reload.ep or topology.ep
    redundancy = reload.redundancy or scenario.system.redundancy
    ranks, rest = divmod(size, _parts(scenario))
    # A dp-cp group divides into shard groups of each expert share, and into cp ranks. The range
    # check reports a cut below 1.
    cuts = (ep * redundancy, topology.cp)
    return rest == 0 and all(cut < 1 or ranks % cut == 0 for cut in cuts)


def _some_rank_has_data(scenario: Scenario) -> bool:
    """Return True if some rank has data in every micro-batch of every step."""
    run = scenario.run
    # Counts repeat, so a full cycle over steps and ranks suffices.
    steps = range(min(run.steps, len(run.own_micro_batches)))
    ranks = range(min(_dp_cp_size(scenario), len(run.own_micro_batches)))
    return all(
        max((own_micro_batches(run, step=step, rank=rank) for rank in ranks), default=0)
        == run.micro_batches
        for step in steps
    )


def _nan_has_data(scenario: Scenario) -> bool:
    """Return True if the rank in `data.nan` has data for that micro-batch."""
    nan, topology = scenario.data.nan, scenario.topology
    # Without the field, every rank has data in every micro-batch.
    if nan is None or not scenario.run.own_micro_batches:
        return True
    size = world_size_at(scenario, step=nan.step)
    # Other rules report indices out of range.
    if not (0 <= nan.rank < size and _splits(topology, size)):
        return True
    place = group_rank_of(nan.rank, topology=topology, world_size=size)
    return own_micro_batches(scenario.run, step=nan.step, rank=place) > nan.micro_batch


def _splits(topology: TopologySpec, world_size: int) -> bool:
    """Return True if the axes are valid and their sizes divide the world."""
    sizes = (topology.tp, topology.cp, topology.pp)
    in_axes = sorted(topology.order.split("-")) == _AXES
    return in_axes and min(sizes) >= 1 and world_size % math.prod(sizes) == 0


def _averages_once(scenario: Scenario) -> bool:
    """Return True if the reduced gradient is the mean over ranks."""
    data, system = scenario.data, scenario.system
    # If each loss is divided by the number of ranks, summed gradients are a mean already.
    means = data.loss == "mean" and system.divide != "none" and system.divide_by == "ranks"
    return means or (data.loss == "mean-of-ranks" and system.divide == "none")


def _is_split(scenario: Scenario) -> bool:
    return is_tp_block(scenario) and scenario.topology.tp > 1


CONDITIONS = (
    Condition(
        reads=("optimizer.loss_scale.initial",),
        broken=lambda s: (
            s.optimizer.loss_scale is not None and not _power_of_two(s.optimizer.loss_scale.initial)
        ),
        message="expected a power of two of 1 to 2^64, so that scaling changes no bit, got {got}.",
        suggestion="Try 1024.0.",
    ),
    Condition(
        reads=("expect.one_device", "data.loss", "system"),
        broken=lambda s: s.expect.one_device and not _averages_once(s),
        message="expect.one_device needs gradients averaged over the ranks, got {got}.",
        suggestion='Try either divide_by = "ranks" or data.loss = "mean-of-ranks" with '
        'divide = "none".',
    ),
    Condition(
        reads=("model.name", "model.dtype", "world.size", "run.micro_batches"),
        broken=lambda s: (
            # Gradients are integers times a unit. Sums beyond the significand are rounded.
            s.model.name == "bit-hash"
            and s.world.size * s.run.micro_batches > _UNITS.get(s.model.dtype, 2**24)
        ),
        message=f"expected at most {_UNITS['bf16']} ranks times micro-batches in bf16, "
        f"{_UNITS['fp16']:,} in fp16, so that their sum is exact, got "
        "more with model {got}.",
        suggestion='Try dtype = "fp32".',
        holds_after=True,
    ),
    Condition(
        reads=("topology.order",),
        broken=lambda s: sorted(s.topology.order.split("-")) != _AXES,
        message="expected an order of tp, cp, dp, pp joined by hyphens, got {got}.",
        suggestion="Try 'tp-cp-dp-pp'.",
    ),
    Condition(
        reads=("topology.order", "topology", "world.size", "reload"),
        broken=lambda s: s.topology.order != default_at("topology.order") and not orders_axes(s),
        message="expected at least two of tp, cp, pp and dp to be more than 1, because one axis "
        "has no order, got {got}.",
        suggestion="Leave it out.",
    ),
    Condition(
        reads=("world.size", "topology.tp", "topology.cp", "topology.pp"),
        broken=lambda s: s.world.size % (_parts(s) * max(s.topology.cp, 1)) != 0,
        message="expected a multiple of topology.tp x cp x pp, got {got}.",
        suggestion="Try that product times the number of data-parallel ranks.",
    ),
    Condition(
        reads=("system.redundancy", "world.size", "topology.tp", "topology.pp"),
        broken=lambda s: (
            s.system.redundancy >= 1 and (s.world.size // _parts(s)) % s.system.redundancy != 0
        ),
        message="expected a divisor of the number of ranks in a dp-cp group, got {got}.",
        suggestion="Try 1.",
    ),
    Condition(
        reads=("topology.ep", "world.size", "topology.tp", "topology.pp", "system.redundancy"),
        broken=lambda s: (
            min(s.topology.ep, s.system.redundancy) >= 1
            and _dp_cp_size(s) % (s.topology.ep * s.system.redundancy) != 0
        ),
        message="expected topology.ep x system.redundancy to divide the number of ranks in a dp-cp "
        "group, got {got}.",
        suggestion="Try 1, or a world.size that is a multiple of tp x pp x ep x redundancy.",
    ),
    Condition(
        reads=("model.experts", "topology.ep", "model.name"),
        broken=lambda s: (
            s.model.name == "moe" and s.topology.ep >= 1 and s.model.experts % s.topology.ep != 0
        ),
        message="expected a multiple of topology.ep, so that each rank has as many, got {got}.",
        suggestion="Try topology.ep times 2.",
    ),
    Condition(
        reads=("reload.ep", "reload", "model", "topology.ep"),
        broken=lambda s: (
            s.reload is not None
            and s.reload.ep is not None
            and s.reload.ep >= 1
            and ((s.reload.ep > 1 and s.model.name != "moe") or s.model.experts % s.reload.ep != 0)
        ),
        message="expected a divisor of model.experts, with model 'moe', got {got}.",
        suggestion="Try 1.",
    ),
    Condition(
        reads=("reload", "world", "topology", "system.redundancy"),
        broken=lambda s: not _reload_splits(s),
        message="expected a number of ranks after the checkpoint that tp x cp x pp and "
        "tp x pp x ep x redundancy divide.",
        suggestion="Try another reload.world_size, or reload.redundancy = 1 and reload.ep = 1.",
    ),
    Condition(
        reads=("faults", "reload"),
        # A call index would mean one call in each world.
        broken=lambda s: bool(s.faults) and s.reload is not None,
        message="faults count the calls in one world, but a reload has two worlds.",
        suggestion="Leave either out.",
    ),
    Condition(
        reads=("system.partition", "system.bucket_elems"),
        # As in FSDP2, which shards each param by itself on dim 0.
        broken=lambda s: s.system.partition == "rows" and s.system.bucket_elems != 1,
        message="expected a bucket for each param, because partition 'rows' cuts between rows, "
        "got {got} with larger buckets.",
        suggestion="Write bucket_elems = 1.",
        holds_after=True,
    ),
    Condition(
        reads=("system.divide_by", "system.divide", "system.sync", "run.own_micro_batches"),
        broken=lambda s: (
            counts_over_ranks(s)
            and s.system.divide in ("pre", "premul")
            and s.system.sync == "every"
        ),
        message="the number of rows, or of micro-batches with data, is known only after the "
        "last micro-batch, got {got} with a division before every sum.",
        suggestion='Try divide = "post", or sync = "last".',
    ),
    Condition(
        reads=("run.own_micro_batches", "run.micro_batches", "run.steps", "world.size", "topology"),
        broken=lambda s: not _some_rank_has_data(s),
        message="expected some rank of each dp-cp group to have data for all of run.micro_batches "
        "in every step, and none for more, got {got}.",
        suggestion="Try one entry per rank, run.micro_batches among them.",
        holds_after=True,
    ),
    Condition(
        reads=("run.own_micro_batches", "system.stage"),
        # A rank learns the gather order from its own forward and backward passes.
        broken=lambda s: s.system.stage == 3 and 0 in s.run.own_micro_batches,
        message="at stage 3 a joining rank gathers params in the order of its last micro-batch, "
        "so it needs data for at least one, got {got}.",
        suggestion="Write at least 1 everywhere, or stage = 2.",
        holds_after=True,
    ),
    Condition(
        reads=("model.recompute", "model.name", "model.blocks"),
        broken=lambda s: (
            s.model.recompute == "reentrant" and s.model.name == "gpt" and s.model.blocks < 2
        ),
        message="expected model.blocks of at least 2, because the first block of 'gpt' is used "
        "twice and has no reentrant checkpoint, got {got}.",
        suggestion='Try blocks = 2, or "non-reentrant".',
    ),
    Condition(
        reads=("model.recompute", "run.own_micro_batches", "system.stage"),
        broken=lambda s: (
            # A joining rank repeats the gathers for a plain forward and backward, but recomputed
            # blocks gather once more.
            s.model.recompute != "none" and s.system.stage == 3 and bool(s.run.own_micro_batches)
        ),
        message="at stage 3 a joining rank gathers params in the order of a forward and backward "
        "without recomputed blocks, got {got}.",
        suggestion="Leave out run.own_micro_batches, or write stage = 2.",
        holds_after=True,
    ),
    Condition(
        reads=("run.own_micro_batches", "data.nan", "world.size", "topology", "reload"),
        broken=lambda s: not _nan_has_data(s),
        message="expected data for the rank, step and micro-batch of data.nan, got {got}.",
        suggestion="Make every entry greater than data.nan.micro_batch.",
    ),
    Condition(
        reads=("reload.step", "run.steps"),
        # A checkpoint before the first step has its own field, `reload.early_save`.
        broken=lambda s: s.reload is not None and not 1 <= s.reload.step < s.run.steps,
        message="expected at least one step before the checkpoint and one after it, got {got}.",
        suggestion="Try 1, and run.steps of at least 2.",
    ),
    Condition(
        reads=("reload.weights_only", "reload.lost_steps"),
        # The reference starts with new optimizer state; the engine would keep the old state.
        broken=lambda s: s.reload is not None and s.reload.weights_only and s.reload.lost_steps > 0,
        message="loading weights only keeps the engine's optimizer state, which lost steps have "
        "made useless, got {got} with reload.lost_steps.",
        suggestion="Leave either out.",
    ),
    Condition(
        reads=("reload.lost_micro_batches", "run.micro_batches"),
        broken=lambda s: s.reload is not None and s.reload.lost_micro_batches > s.run.micro_batches,
        message="expected at most run.micro_batches, got {got}.",
        suggestion="Write 1.",
    ),
    # Without a reload to stage 3, `applies` refuses an arena beside reduce buffers.
    Condition(
        reads=("system.arena", "system.reduce_buffer_elems", "reload.stage"),
        broken=lambda s: (
            s.system.arena
            and s.system.reduce_buffer_elems is not None
            and s.reload is not None
            and s.reload.stage == 3
        ),
        message="an arena is for unsharded gradients that come and go bucket by bucket, got {got} "
        "with system.reduce_buffer_elems, which has its own buffers.",
        suggestion="Leave either out.",
    ),
    Condition(
        reads=("system.reduce_buffer_elems", "system.stage", "system.sync"),
        broken=lambda s: (
            s.system.reduce_buffer_elems is not None
            and s.system.stage == 2
            and s.system.sync == "last"
        ),
        message="at stage 2 gradients are reduced during backward, and none is kept for the next "
        'micro-batch, got {got} with system.sync = "last".',
        suggestion='Write sync = "every", or stage = 1.',
        holds_after=True,
    ),
    Condition(
        reads=("model.hidden", "model.name", "topology.tp"),
        broken=lambda s: is_tp_block(s) and not splits_heads(s),
        message=f"expected a multiple of {HEAD_ELEMS} x topology.tp, so that each tensor-parallel "
        "rank has whole heads, got {got}.",
        suggestion=f"Try {HEAD_ELEMS} times topology.tp, or 8.",
    ),
    Condition(
        reads=("model.hidden", "model.name", "model.dtype", "data.rows", "data.uneven_rows"),
        # `terms_max` counts the longest sums.
        broken=lambda s: is_tp_block(s) and s.model.hidden > 0 and not is_exact(s),
        message="expected 3 x hidden and 4 x rows of at most 256 in bf16, 2,048 in fp16, so that "
        "no sum of a layer is rounded and a split sum has the bits of the whole, got {got}.",
        suggestion='Try hidden = 8 and rows = 4, or dtype = "fp32".',
    ),
    Condition(
        reads=("topology.shared", "model.name", "topology.tp"),
        broken=lambda s: _is_split(s) and s.topology.shared != (SHARED,),
        message=f"expected '{SHARED}', the only param that all tensor-parallel ranks have whole, "
        "got {got}.",
        suggestion=f'Write shared = ["{SHARED}"].',
    ),
    Condition(
        reads=("world.order", "model.name", "topology.tp"),
        broken=lambda s: _is_split(s) and s.world.order not in ("linear", "linear-fp32"),
        message="expected an order that does not depend on an element's position, because a single "
        "device does not know positions on the ranks, got {got}.",
        suggestion='Write order = "linear".',
    ),
    Condition(
        reads=("system.target", "model.name", "topology.tp"),
        broken=lambda s: _is_split(s) and s.system.target != "zero_sim",
        message="expected 'zero_sim', because it sums outputs of split layers over the ranks, got "
        "{got}.",
        suggestion="Leave it out, or topology.tp.",
    ),
)


def why_order_matters(scenario: Scenario) -> str:
    """Return the feature that needs a known order of addition; empty if there is none."""
    if scenario.reload is not None:
        return "a reload"
    if scenario.model.name in UNBOUNDED_MODELS:
        return "experts or fp8 params"
    if scenario.optimizer.name in WHOLE_PARAM_OPTIMIZERS:
        return "an optimizer that needs whole params, while a rank reports its part"
    return "tensor- or pipeline-parallel ranks" if _parts(scenario) > 1 else ""


def check_order_known(scenario: Scenario) -> Iterator[Problem]:
    """Check that bounds can judge a case with an unknown order."""
    why = why_order_matters(scenario)
    if why and not scenario.world.order_known:
        yield Problem(
            path="world.order_known",
            message=f"expected a known order of addition in a case with {why}, got false.",
            suggestion="Leave it out.",
        )
