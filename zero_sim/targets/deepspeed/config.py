"""DeepSpeed's config, as a case asks for it."""

from __future__ import annotations

from typing import Any

from zero_sim.scenario.spec import Scenario

_ALL = 500_000_000
"""Elements of a bucket that no model here fills."""


def config_of(scenario: Scenario, *, stage: int) -> dict[str, Any]:
    """The config that a case asks for."""
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
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": scenario.run.micro_batches,
        "gradient_clipping": scenario.optimizer.clip_norm or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
