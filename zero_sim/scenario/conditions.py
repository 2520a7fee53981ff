"""Conditions on values of several fields of a scenario.

A row has the fields that it reads, and what is reported where if it is broken. Settings that need
others are in `zero_sim.scenario.applies`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from zero_sim.errors import Problem
from zero_sim.scenario.derived import (
    counts_over_ranks,
    own_micro_batches,
    place_in_group,
    world_size_at,
)
from zero_sim.scenario.fields import default_at, describe_value
from zero_sim.scenario.fitting import orders_axes
from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.spec import Scenario, TopologySpec
from zero_sim.scenario.tp_block import HEAD_ELEMS, SHARED, is_exact, is_tp_block, splits_heads

_AXES = ["cp", "dp", "pp", "tp"]
_LOSS_SCALE_MAX = 2.0**64
_UNITS = {"bf16": 2**8, "fp16": 2**11}
"""What 16-bit dtypes add exactly, in units of which each rank and micro-batch needs one."""
UNBOUNDED_MODELS = ("moe", "fp8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """One thing that must not be."""

    reads: tuple[str, ...]
    """Fields it looks at; the first one is where the problem is reported."""
    broken: Callable[[Scenario], bool]
    message: str
    """What was expected; `{got}` stands for the value of the first field."""
    suggestion: str
    holds_after: bool = False
    """Whether it is asked of the case after its checkpoint, too."""

    def check(self, scenario: Scenario) -> Iterator[Problem]:
        """Give the problem, if the condition is broken."""
        if self.broken(scenario):
            value = describe_value(attrgetter(self.reads[0])(scenario))
            yield Problem(
                path=self.reads[0],
                message=self.message.format(got=value),
                suggestion=self.suggestion,
            )


def _power_of_two(value: float) -> bool:
    return 1 <= value <= _LOSS_SCALE_MAX and math.frexp(value)[0] == 0.5


def _parts(scenario: Scenario) -> int:
    """Number of dp-cp groups, each of which trains params of its own."""
    return max(scenario.topology.tp, 1) * max(scenario.topology.pp, 1)


def _dp_cp_size(scenario: Scenario) -> int:
    """Number of ranks of a dp-cp group."""
    return scenario.world.size // _parts(scenario)


def _reload_splits(scenario: Scenario) -> bool:
    """Whether the world after a reload can be cut into cells, experts' groups and copies."""
    if scenario.reload is None:
        return True
    reload, topology = scenario.reload, scenario.topology
    size = reload.world_size or scenario.world.size
    ep = reload.ep or topology.ep
    redundancy = reload.redundancy or scenario.system.redundancy
    ranks, rest = divmod(size, _parts(scenario))
    cuts = (ep * redundancy, topology.cp)
    return rest == 0 and all(cut < 1 or ranks % cut == 0 for cut in cuts)


def _somebody_trains(scenario: Scenario) -> bool:
    """Whether in every micro-batch of every step some rank has data."""
    run = scenario.run
    steps = range(min(run.steps, len(run.own_micro_batches)))
    ranks = range(min(_dp_cp_size(scenario), len(run.own_micro_batches)))
    return all(
        max((own_micro_batches(run, step=step, rank=rank) for rank in ranks), default=0)
        == run.micro_batches
        for step in steps
    )


def _has_data_to_spoil(scenario: Scenario) -> bool:
    """Whether the rank that is to see a NaN has the micro-batch that holds it."""
    nan, topology = scenario.data.nan, scenario.topology
    if nan is None or not scenario.run.own_micro_batches:
        return True
    size = world_size_at(scenario, step=nan.step)
    # What is out of range by itself is another's problem.
    if not (0 <= nan.rank < size and _splits(topology, size)):
        return True
    place = place_in_group(nan.rank, topology=topology, world_size=size)
    return own_micro_batches(scenario.run, step=nan.step, rank=place) > nan.micro_batch


def _splits(topology: TopologySpec, world_size: int) -> bool:
    """Whether a world of that size can be numbered along the axes."""
    sizes = (topology.tp, topology.cp, topology.pp)
    in_axes = sorted(topology.order.split("-")) == _AXES
    return in_axes and min(sizes) >= 1 and world_size % math.prod(sizes) == 0


def _averages_once(scenario: Scenario) -> bool:
    """Whether the sum over ranks with equal gradients is their mean."""
    data, system = scenario.data, scenario.system
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
        message="ranks compute what one device does only if their gradients are averaged, got "
        "{got}.",
        suggestion='Try either divide_by = "ranks" or data.loss = "mean-of-ranks" with '
        'divide = "none".',
    ),
    Condition(
        reads=("model.name", "model.dtype", "world.size", "run.micro_batches"),
        broken=lambda s: (
            s.model.name == "bit-hash"
            and s.world.size * s.run.micro_batches > _UNITS.get(s.model.dtype, 2**24)
        ),
        message=f"expected at most {_UNITS['bf16']} ranks times micro-batches in bf16, "
        f"{_UNITS['fp16']:,} in fp16, among which the units that they add exactly are shared, got "
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
        message="expected two of tp, cp, pp and dp to be more than 1, for axes to have an order, "
        "got {got} with one axis.",
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
        message="expected a divisor of the ranks of a dp-cp group, got {got}.",
        suggestion="Try 1.",
    ),
    Condition(
        reads=("topology.ep", "world.size", "topology.tp", "topology.pp", "system.redundancy"),
        broken=lambda s: (
            min(s.topology.ep, s.system.redundancy) >= 1
            and _dp_cp_size(s) % (s.topology.ep * s.system.redundancy) != 0
        ),
        message="expected a divisor of the ranks of a dp-cp group, so often that each experts' "
        "group still holds system.redundancy copies, got {got}.",
        suggestion="Try 1, or a world.size that is a multiple of tp x pp x ep x redundancy.",
    ),
    Condition(
        reads=("model.experts", "topology.ep", "model.name"),
        broken=lambda s: (
            s.model.name == "moe" and s.topology.ep >= 1 and s.model.experts % s.topology.ep != 0
        ),
        message="expected a multiple of topology.ep, so that ranks hold equally many, got {got}.",
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
        message="expected a divisor of model.experts of a model 'moe', got {got}.",
        suggestion="Try 1.",
    ),
    Condition(
        reads=("reload", "world", "topology", "system.redundancy"),
        broken=lambda s: not _reload_splits(s),
        message="expected ranks after the checkpoint that tp x cp x pp and "
        "tp x pp x ep x redundancy divide.",
        suggestion="Try another reload.world_size, or reload.redundancy = 1 and reload.ep = 1.",
    ),
    Condition(
        reads=("faults", "reload"),
        broken=lambda s: bool(s.faults) and s.reload is not None,
        message="calls are counted within one world, and a reload makes two.",
        suggestion="Leave either out.",
    ),
    Condition(
        reads=("system.partition", "system.bucket_elems"),
        broken=lambda s: s.system.partition == "rows" and s.system.bucket_elems != 1,
        message="expected every param to be a bucket of its own, to be cut between its rows, "
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
        message="the number of rows, or of micro-batches that had data, is known only after the "
        "last micro-batch, got {got} with a division before every sum.",
        suggestion='Try divide = "post", or sync = "last".',
    ),
    Condition(
        reads=("run.own_micro_batches", "run.micro_batches", "run.steps", "world.size", "topology"),
        broken=lambda s: not _somebody_trains(s),
        message="expected some rank of each dp-cp group to have data for all of run.micro_batches "
        "in every step, and none for more, got {got}.",
        suggestion="Try as many entries as there are ranks, run.micro_batches among them.",
        holds_after=True,
    ),
    Condition(
        reads=("run.own_micro_batches", "system.stage"),
        broken=lambda s: s.system.stage == 3 and 0 in s.run.own_micro_batches,
        message="at stage 3 a rank that joins gathers params in the order of its last micro-batch, "
        "so that it must have one of its own before, got {got}.",
        suggestion="Write at least 1 everywhere, or stage = 2.",
        holds_after=True,
    ),
    Condition(
        reads=("model.recompute", "model.name", "model.blocks"),
        broken=lambda s: (
            s.model.recompute == "reentrant" and s.model.name == "gpt" and s.model.blocks < 2
        ),
        message="expected model.blocks of at least 2, because the first block of 'gpt', which it "
        "uses twice, has no reentrant checkpoint, got {got}.",
        suggestion='Try blocks = 2, or "non-reentrant".',
    ),
    Condition(
        reads=("model.recompute", "run.own_micro_batches", "system.stage"),
        broken=lambda s: (
            s.model.recompute != "none" and s.system.stage == 3 and bool(s.run.own_micro_batches)
        ),
        message="at stage 3 a rank that joins gathers params in the order of a forward and its "
        "backward, in which no block runs again, got {got}.",
        suggestion="Leave out run.own_micro_batches, or write stage = 2.",
        holds_after=True,
    ),
    Condition(
        reads=("run.own_micro_batches", "data.nan", "world.size", "topology", "reload"),
        broken=lambda s: not _has_data_to_spoil(s),
        message="the rank of data.nan has no data for its micro-batch of its step, got {got}.",
        suggestion="Write more than data.nan.micro_batch everywhere.",
    ),
    Condition(
        reads=("reload.step", "run.steps"),
        broken=lambda s: s.reload is not None and not 1 <= s.reload.step < s.run.steps,
        message="expected at least one step before the checkpoint and one after it, got {got}.",
        suggestion="Try 1, and run.steps of at least 2.",
    ),
    Condition(
        reads=("reload.weights_only", "reload.lost_steps"),
        broken=lambda s: s.reload is not None and s.reload.weights_only and s.reload.lost_steps > 0,
        message="weights alone leave an engine the optimizer state that it has, and that of lost "
        "steps is of no use, got {got} with reload.lost_steps.",
        suggestion="Leave out either.",
    ),
    Condition(
        reads=("reload.lost_micro_batches", "run.micro_batches"),
        broken=lambda s: s.reload is not None and s.reload.lost_micro_batches > s.run.micro_batches,
        message="expected at most the run.micro_batches of one step, got {got}.",
        suggestion="Write 1.",
    ),
    # Elsewhere `applies` refuses an arena beside reduce buffers.
    Condition(
        reads=("system.arena", "system.reduce_buffer_elems", "reload.stage"),
        broken=lambda s: (
            s.system.arena
            and s.system.reduce_buffer_elems is not None
            and s.reload is not None
            and s.reload.stage == 3
        ),
        message="an arena holds whole gradients that come and go bucket by bucket, got {got} with "
        "system.reduce_buffer_elems, which has buffers of its own.",
        suggestion="Leave either out.",
    ),
    Condition(
        reads=("system.reduce_buffer_elems", "system.stage", "system.sync"),
        broken=lambda s: (
            s.system.reduce_buffer_elems is not None
            and s.system.stage == 2
            and s.system.sync == "last"
        ),
        message="at stage 2 gradients leave as backward goes, and none stays for the next "
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
        broken=lambda s: is_tp_block(s) and s.model.hidden > 0 and not is_exact(s),
        message="expected a width, and rows, at which no sum of a layer has more terms than the "
        "dtype adds without rounding (3 x hidden, 4 x rows; 256 of bf16, 2,048 of fp16), so that "
        "a split sum has the bits of the whole, got {got}.",
        suggestion='Try hidden = 8 and rows = 4, or dtype = "fp32".',
    ),
    Condition(
        reads=("topology.shared", "model.name", "topology.tp"),
        broken=lambda s: _is_split(s) and s.topology.shared != (SHARED,),
        message=f"expected '{SHARED}', the one param that all tensor-parallel ranks hold whole, "
        "got {got}.",
        suggestion=f'Write shared = ["{SHARED}"].',
    ),
    Condition(
        reads=("world.order", "model.name", "topology.tp"),
        broken=lambda s: _is_split(s) and s.world.order not in ("linear", "linear-fp32"),
        message="expected an order that does not depend on where an element lies: one device knows "
        "no places of what other ranks hold, got {got}.",
        suggestion='Write order = "linear".',
    ),
    Condition(
        reads=("system.target", "model.name", "topology.tp"),
        broken=lambda s: _is_split(s) and s.system.target != "zero_sim",
        message="expected 'zero_sim', which sums what split layers give over the ranks, got {got}.",
        suggestion="Leave it out, or topology.tp.",
    ),
)


def why_order_matters(scenario: Scenario) -> str:
    """What a case has that can be judged only where the order of addition is known; or empty."""
    if scenario.reload is not None:
        return "a reload"
    if scenario.model.name in UNBOUNDED_MODELS:
        return "experts or fp8 params"
    if scenario.optimizer.name in WHOLE_PARAM_OPTIMIZERS:
        return "an optimizer that looks at whole params, of which a rank shows its part"
    return "tensor- or pipeline-parallel ranks" if _parts(scenario) > 1 else ""


def check_order_known(scenario: Scenario) -> Iterator[Problem]:
    """Check that a case can be judged by bounds, where it is to be."""
    why = why_order_matters(scenario)
    if why and not scenario.world.order_known:
        yield Problem(
            path="world.order_known",
            message=f"expected a known order of addition in a case with {why}, got false.",
            suggestion="Leave it out.",
        )
