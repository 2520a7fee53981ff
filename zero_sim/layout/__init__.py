"""Layouts: flat offsets, padding, buckets, shards and fragments. Integers only, no tensors."""

from __future__ import annotations

from zero_sim.layout.arena import ArenaPlan, plan_arena
from zero_sim.layout.grad_plan import GradUnitPlan, plan_grad_units
from zero_sim.layout.integers import ceil_div, round_up
from zero_sim.layout.partition import Partition, PartitionRule
from zero_sim.layout.plan import BucketPlan, BufferKey, BufferPlan, Fragment, PlacedParam
from zero_sim.layout.planner import plan_buffers
from zero_sim.layout.request import LayoutPolicy, ParamOrder, ParamSpec
from zero_sim.layout.span import Span

__all__ = [
    "ArenaPlan",
    "BucketPlan",
    "BufferKey",
    "BufferPlan",
    "Fragment",
    "GradUnitPlan",
    "LayoutPolicy",
    "ParamOrder",
    "ParamSpec",
    "Partition",
    "PartitionRule",
    "PlacedParam",
    "Span",
    "ceil_div",
    "plan_arena",
    "plan_buffers",
    "plan_grad_units",
    "round_up",
]
