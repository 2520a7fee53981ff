"""The reference: plain params and explicit sums on one device, sharing no code with systems."""

from __future__ import annotations

from zero_sim.reference.adding import POSITION_FREE, AddOrder, SumSite, SumSpan
from zero_sim.reference.again import Again, StepAgain, Terms
from zero_sim.reference.arrangement import Arrangement
from zero_sim.reference.bounded import BoundedReference, BoundedStep
from zero_sim.reference.bounding import Interval
from zero_sim.reference.clipping import CLIP_FORMS, ClipForm, takes_root
from zero_sim.reference.computed import computed_from, computed_of_system
from zero_sim.reference.division import AVERAGES, DIVIDE_RULES, DivideRule, Division, quotient
from zero_sim.reference.following import Follower
from zero_sim.reference.norms import (
    NORMS,
    ROOTED,
    Holding,
    Holdings,
    Norm,
    norms_of_shard,
    wide_ends,
)
from zero_sim.reference.oracle import Reference, step_together
from zero_sim.reference.own_rule import OwnRule
from zero_sim.reference.placement import Addresses, MemoryLayout, memory_layout_of
from zero_sim.reference.quantization import encode
from zero_sim.reference.ranks import Orders
from zero_sim.reference.replay import NonFinite
from zero_sim.reference.rules import (
    ClipFunction,
    DivideEach,
    GradDtype,
    Masters,
    NonFiniteRule,
    Rules,
    Sync,
    Unused,
)
from zero_sim.reference.scaling import LossRows, ScaleLoss, ScaleLossFunction
from zero_sim.reference.stepping import same_elements, settings_in_words
from zero_sim.reference.steps import ReferenceStep, TrainingState

__all__ = [
    "AVERAGES",
    "CLIP_FORMS",
    "DIVIDE_RULES",
    "NORMS",
    "POSITION_FREE",
    "ROOTED",
    "AddOrder",
    "Addresses",
    "Again",
    "Arrangement",
    "BoundedReference",
    "BoundedStep",
    "ClipForm",
    "ClipFunction",
    "DivideEach",
    "DivideRule",
    "Division",
    "Follower",
    "GradDtype",
    "Holding",
    "Holdings",
    "Interval",
    "LossRows",
    "Masters",
    "MemoryLayout",
    "NonFinite",
    "NonFiniteRule",
    "Norm",
    "Orders",
    "OwnRule",
    "Reference",
    "ReferenceStep",
    "Rules",
    "ScaleLoss",
    "ScaleLossFunction",
    "StepAgain",
    "SumSite",
    "SumSpan",
    "Sync",
    "Terms",
    "TrainingState",
    "Unused",
    "computed_from",
    "computed_of_system",
    "encode",
    "memory_layout_of",
    "norms_of_shard",
    "quotient",
    "same_elements",
    "settings_in_words",
    "step_together",
    "takes_root",
    "wide_ends",
]
