"""Layout of a case, planned again from its settings."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from zero_sim.layout import BufferPlan, LayoutPolicy, ParamSpec, plan_buffers
from zero_sim.scenario.kinds import kind_of
from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario, TopologySpec
from zero_sim.targets.torch.optim import group_index
from zero_sim.workloads import build_module, build_workload

_MODELS_KEPT = 512
_DTYPES = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float8_e4m3fn": "fp8-e4m3",
    "torch.float8_e5m2": "fp8-e5m2",
}


def layouts_of(scenario: Scenario) -> tuple[BufferPlan, ...]:
    """Return the dense and expert buffers of a rank before a reload.

    Args:
        scenario: A valid case.

    Returns:
        A plan per buffer, with a single shard at stage 0.
    """
    topology, system = scenario.topology, scenario.system
    # Size of a dp-cp group, whose ranks hold the same dense params.
    holders = scenario.world.size // (topology.tp * topology.pp)
    shard_counts = {"dense": holders, "expert": holders // topology.ep}
    plans: list[BufferPlan] = []
    specs = param_specs(scenario.model, ep=topology.ep)
    if system.buffers_by == "param-group":
        of = scenario.optimizer
        specs = tuple(replace(spec, group=group_index(of, spec.name)) for spec in specs)
    # Dense and expert params have different numbers of holders, so each kind has its own buffers.
    for kind in dict.fromkeys(spec.kind for spec in specs):
        policy = LayoutPolicy(
            shard_count=1 if system.stage == 0 else shard_counts[kind] // system.redundancy,
            align_elems=system.align_elems,
            align_bytes=system.align_bytes,
            bucket_elems=system.bucket_elems,
            param_order=system.param_order,
            partition=system.partition,
        )
        own = [spec for spec in specs if spec.kind == kind]
        plans.extend(plan_buffers(own, policy=policy))
    return tuple(plans)


def param_specs(model: ModelSpec, *, ep: int = 1) -> tuple[ParamSpec, ...]:
    """Return a model's trained params as layout specs, in registration order.

    Args:
        model: The model.
        ep: Expert-parallel size. The result is for the first expert-parallel rank.
    """
    # Reset settings that do not affect the layout, so that more models share a cache entry.
    return _param_specs(replace(model, tied=(), unused=(), skip=(), one_rank=(), freeze=()), ep)


@lru_cache(maxsize=_MODELS_KEPT)
def _param_specs(model: ModelSpec, ep: int) -> tuple[ParamSpec, ...]:
    scenario = Scenario(
        schema=1, model=model, topology=TopologySpec(ep=ep), run=RunSpec(steps=1, seed=0)
    )
    # Building the module takes time, hence the cache.
    module = build_module(build_workload(scenario), expert_index=0)
    return tuple(
        ParamSpec(
            name=name,
            shape=tuple(param.shape),
            dtype=_DTYPES[str(param.dtype)],
            kind=kind_of(name),
        )
        for name, param in module.named_parameters()
        if param.requires_grad
    )
