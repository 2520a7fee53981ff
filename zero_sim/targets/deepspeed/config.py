"""DeepSpeed's config, as a case asks for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zero_sim.scenario.spec import Scenario

_ALL = 500_000_000
"""Elements of a bucket that no model here fills."""


def config_of(scenario: Scenario, *, stage: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The config that a case asks for.

    Args:
        scenario: The case, which the target is not refused.
        stage: Of ZeRO.
        options: The value of each option.
    """
    system = scenario.system
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": bool(system.overlap_grads),
        "reduce_scatter": system.sum_by == "reduce-scatter",
        "contiguous_gradients": system.contiguous_grads,
        "reduce_bucket_size": system.reduce_buffer_elems or system.bucket_elems or _ALL,
        "allgather_bucket_size": 2 * (system.gather_chunk_elems or _ALL),  # an even number
        "stage3_param_persistence_threshold": 0 if system.reshard_after_forward else _ALL,
        "stage3_prefetch_bucket_size": _ALL if system.prefetch is None else system.prefetch,
        # The linear that stage 3 puts in the place of torch's stays there for the whole process.
        "memory_efficient_linear": False,
    }
    wire, wide = options["communication"], options.get("accumulation", "param")
    return {
        **_half(scenario),
        **({} if wire == "param" else {"communication_data_type": wire}),
        **({"checkpoint": {"load_universal": True}} if options.get("universal") else {}),
        **({} if wide == "param" else {"data_types": {"grad_accum_dtype": wide}}),
        "gradient_predivide_factor": options.get("predivide", 1.0),
        "prescale_gradients": options.get("prescale", False),
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": scenario.run.micro_batches,
        "gradient_clipping": scenario.optimizer.clip_norm or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }


def _half(scenario: Scenario) -> dict[str, Any]:
    """What it says of bf16 or fp16; in fp16 losses are scaled, by 1 if not asked for."""
    if scenario.model.dtype != "fp16":
        return {"bf16": {"enabled": True}} if scenario.model.dtype == "bf16" else {}
    half: dict[str, Any] = {"enabled": True, "loss_scale": 1.0}
    scale = scenario.optimizer.loss_scale
    if scale is not None:
        half |= {
            "loss_scale": 0,
            "initial_scale_power": int(math.log2(scale.initial)),
            # Counted so that the scale grows when the scenario's does, the first time.
            "loss_scale_window": max(1, scale.growth_interval - 1),
            "hysteresis": 1,
            "min_loss_scale": 1,
        }
    return {"fp16": half}
