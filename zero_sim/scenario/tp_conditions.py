"""Conditions of the model `tp-block`, whose layers tensor-parallel ranks split."""

from __future__ import annotations

from zero_sim.scenario.conditions import Condition
from zero_sim.scenario.spec import Scenario
from zero_sim.scenario.tp_block import (
    HEAD_ELEMS,
    SHARED,
    is_exact,
    is_tp_block,
    splits_heads,
)


def _is_split(scenario: Scenario) -> bool:
    return is_tp_block(scenario) and scenario.topology.tp > 1


TP_CONDITIONS = (
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
        reads=("topology.pp", "model.name"),
        broken=lambda s: is_tp_block(s) and s.topology.pp > 1,
        message="expected all blocks on each rank with model 'tp-block', which splits layers and "
        "not their sequence, got {got}.",
        suggestion="Leave it out, and write tp.",
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
        reads=("world.order_known", "model.name"),
        broken=lambda s: is_tp_block(s) and not s.world.order_known,
        message="expected a known order with model 'tp-block', all parts of which one device "
        "trains, got {got}.",
        suggestion="Leave it out.",
    ),
    Condition(
        reads=("model.freeze", "model.name"),
        broken=lambda s: is_tp_block(s) and bool(s.model.freeze),
        message="expected all params of model 'tp-block' to be trained, as a frozen one would "
        "leave out sums over the ranks, got {got}.",
        suggestion="Leave it out.",
    ),
    Condition(
        reads=("run.own_micro_batches", "model.name"),
        broken=lambda s: is_tp_block(s) and bool(s.run.own_micro_batches),
        message="expected as many micro-batches on each rank with model 'tp-block', whose sums "
        "over the ranks are counted, got {got}.",
        suggestion="Leave it out.",
    ),
    Condition(
        reads=("expect.one_device", "model.name"),
        broken=lambda s: is_tp_block(s) and s.expect.one_device,
        message="only of ranks that hold all params it is said that they compute what one device "
        "does, got {got} with model 'tp-block'.",
        suggestion="Leave it out.",
    ),
    Condition(
        reads=("system.checkpoints", "system.stage"),
        broken=lambda s: s.system.checkpoints != "none" and s.system.stage == 3,
        message="expected a stage that keeps params whole, as stage 3 frees those of a block that "
        "is to be run again, got {got} with stage 3.",
        suggestion="Leave it out, or write stage = 2.",
    ),
    Condition(
        reads=("system.target", "model.name", "topology.tp"),
        broken=lambda s: _is_split(s) and s.system.target != "zero_sim",
        message="expected 'zero_sim', which sums what split layers give over the ranks, got {got}.",
        suggestion="Leave it out, or topology.tp.",
    ),
)
"""As `zero_sim.scenario.conditions.CONDITIONS`."""
