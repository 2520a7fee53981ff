"""Models, data and losses for systems and the reference, by their names in scenarios."""

from __future__ import annotations

from zero_sim.workloads.draws import seed_of
from zero_sim.workloads.exact import EXACT_MODELS
from zero_sim.workloads.own_model import OwnModel, known_models, make_known
from zero_sim.workloads.placed import on_device
from zero_sim.workloads.protocol import (
    Batch,
    ExpertWorkload,
    Workload,
    build_module,
    loss_terms,
    total_loss,
)
from zero_sim.workloads.recompute import keep_activations
from zero_sim.workloads.registry import build_workload, params_of
from zero_sim.workloads.starts import make_distinct, make_unloaded, saved_buffers

__all__ = [
    "EXACT_MODELS",
    "Batch",
    "ExpertWorkload",
    "OwnModel",
    "Workload",
    "build_module",
    "build_workload",
    "keep_activations",
    "known_models",
    "loss_terms",
    "make_distinct",
    "make_known",
    "make_unloaded",
    "on_device",
    "params_of",
    "saved_buffers",
    "seed_of",
    "total_loss",
]
