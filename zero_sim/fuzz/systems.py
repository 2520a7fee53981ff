"""Drawn topologies, worlds, system settings and reloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from hypothesis import strategies as st

from zero_sim.errors import ProtocolError
from zero_sim.fuzz.choices import Choices
from zero_sim.fuzz.shapes import bucket_size, divisors
from zero_sim.fuzz.swarm import Swarm
from zero_sim.scenario.spec import (
    ModelSpec,
    OrderName,
    PartitionName,
    ReloadSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)
from zero_sim.targets import Option, Target, options_of, with_options
from zero_sim.targets.options import OptionValue, written

_ENDINGS = ("bias", "weight", "0", "router", "1")
_AXES = ("tp-cp-dp-pp", "pp-dp-cp-tp", "dp-tp-cp-pp")
_DIVISIONS: tuple[Literal["none", "pre", "premul"], ...] = ("none", "pre", "premul")
_COUNTS: tuple[Literal["micro-batches", "tokens"], ...] = ("micro-batches", "tokens")
# Number of buckets ahead. 9 is more than most cases have.
_PREFETCHES = (0, 2, 1, 9)
_SUMS: tuple[Literal["all-reduce", "first-rank"], ...] = ("all-reduce", "first-rank")
_PARTITIONS: tuple[PartitionName, ...] = ("uneven", "one-owner", "rows")
Stage = Literal[0, 1, 2, 3]
_ORDERS: tuple[OrderName, ...] = get_args(OrderName)


def shares(model: ModelSpec, ranks: int, *, swarm: Swarm) -> list[int]:
    """Return the possible expert-parallel sizes for a model, 1 first.

    Args:
        model: The model.
        ranks: Size of a dp-cp group.
        swarm: Features of the case.
    """
    if model.name != "moe" or not swarm.follows("topology.ep"):
        return [1]
    # Every rank has the same number of experts.
    return [ways for ways in divisors(ranks) if model.experts % ways == 0]


def drawn_topology(choices: Choices, *, ranks: int, parts_max: int, swarm: Swarm) -> TopologySpec:
    """Draw a topology without expert parallelism.

    Args:
        choices: Source of choices.
        ranks: Size of a dp-cp group.
        parts_max: Maximum number of dp-cp groups.
        swarm: Features of the case.
    """
    tp = pp = cp = 1
    if swarm.on("tp", fits=parts_max >= 2):
        tp = choices.integer(2, min(parts_max, 3))
    if swarm.on("pp", fits=parts_max // tp >= 2):
        pp = 2
    if swarm.on("cp", fits=ranks > 1):
        cp = choices.among(divisors(ranks)[1:])
    turned = swarm.follows("topology.order")
    return TopologySpec(
        tp=tp,
        cp=cp,
        pp=pp,
        shared=_endings(choices) if swarm.on("shared", fits=tp > 1) else (),
        tied=_endings(choices) if swarm.on("tied", fits=pp > 1) else (),
        order=choices.among(_AXES) if turned and tp * pp > 1 else _AXES[0],
    )


def _endings(choices: Choices) -> tuple[str, ...]:
    return tuple(choices.among(_ENDINGS) for _ in range(choices.integer(1, 2)))


def drawn_world(choices: Choices, *, size: int, swarm: Swarm) -> WorldSpec:
    """Draw a world: summation order, schedule, timing, races.

    Args:
        choices: Source of choices.
        size: Number of ranks.
        swarm: Features of the case.
    """
    known = swarm.able.known_orders
    # If the target has no known order, draw any order: bounds hold for all orders.
    orders = [order for order in _ORDERS if order in known or not known]
    any_order = len(orders) > 1 and swarm.on("any order", often=True)
    return WorldSpec(
        size=size,
        order=choices.among(orders) if any_order else orders[0],
        order_known=bool(known),
        schedule=choices.among(["random", "pct"]) if swarm.on("schedule") else "round-robin",
        timing=choices.among(["lazy", "hostile"]) if swarm.on("timing") else "eager",
        races=swarm.on("races"),
    )


def drawn_system(
    choices: Choices,
    *,
    ranks: int,
    sizes: Sequence[int],
    align_elems: int = 1,
    swarm: Swarm,
) -> SystemSpec:
    """Draw the system settings.

    Args:
        choices: Source of choices.
        ranks: Number of ranks with the same params, including experts.
        sizes: Elements of each param, for buckets that fit exactly.
        align_elems: Alignment of shards in elements.
        swarm: Features of the case.
    """
    stage = _drawn_stage(choices, swarm)
    # Draw each setting only if the settings before allow it; see scenario/applies.py.
    buffered = swarm.on("reduce buffers", fits=stage in (1, 2))
    uneven = swarm.on("uneven", fits=stage > 0 and align_elems == 1)
    sync = "every" if swarm.on("sync every") or (buffered and stage == 2) else "last"
    divide = choices.among(_DIVISIONS) if swarm.on("divide") else "post"
    # The number of tokens is unknown before the last micro-batch.
    counts = _COUNTS if sync == "last" or divide in ("none", "post") else _COUNTS[:1]
    partition: PartitionName = choices.among(_PARTITIONS) if uneven else "padded"
    if partition == "rows" and not swarm.follows("system.bucket_elems"):
        # `rows` needs a bucket per param, which this target does not support.
        partition = "uneven"
    bucket_elems = bucket_size(choices, sizes) if swarm.on("buckets") else None
    redundancy = _redundancy(choices, ranks, fits=stage > 0 and not buffered, swarm=swarm)
    in_chunks = swarm.on("gather chunks", fits=stage in (1, 2) and partition != "one-owner")
    return SystemSpec(
        stage=stage,
        redundancy=redundancy,
        partition=partition,
        param_order="reverse" if swarm.on("reverse") else "registration",
        align_elems=align_elems,
        align_bytes=choices.among([1, 16, 128])
        if align_elems > 1 and swarm.follows("system.align_bytes")
        else 1,
        # `rows` cuts each param between rows, so a bucket contains a single param.
        bucket_elems=1 if partition == "rows" else bucket_elems,
        # By default (None), systems with buckets overlap.
        overlap_grads=choices.among((False, True)) if swarm.on("overlap grads") else None,
        # Chunks of a gather use the same memory in turn, so forward cannot overlap the gather.
        overlap_params=choices.among((False, True))
        if swarm.on("overlap params", fits=stage in (1, 2) and not in_chunks)
        else None,
        # Stage 0 always sums by all-reduce, and with reduce buffers the first rank cannot sum.
        sum_by=choices.among(_SUMS[: 1 if buffered else 2] if stage else _SUMS[1:])
        if swarm.on("summed to all")
        else "reduce-scatter",
        gather_after_step=swarm.on("gathered after step", fits=stage == 3),
        **_through_buffers(choices, sizes, stage, buffered=buffered, chunks=in_chunks, swarm=swarm),
        prefetch=choices.among(_PREFETCHES) if swarm.on("prefetch", fits=stage == 3) else None,
        reshard_after_forward=not swarm.on("kept after forward", fits=stage == 3),
        sync=sync,
        divide=divide,
        divide_by=choices.among(counts) if swarm.on("divide by", often=ranks == 1) else "ranks",
        grad_dtype="fp32" if swarm.on("fp32 grads") else "param",
    )


def _redundancy(choices: Choices, ranks: int, *, fits: bool, swarm: Swarm) -> int:
    # Fewer replicas than ranks are more frequent: then groups within and between replicas both have
    # several ranks, so that a system may confuse them.
    counts = divisors(ranks)[1:] if fits else []
    shared = counts[:-1]
    has_replicas = swarm.on("copies", fits=bool(counts), often=bool(shared))
    return choices.among([*shared, *shared, *counts]) if has_replicas else 1


def _through_buffers(
    choices: Choices,
    sizes: Sequence[int],
    stage: Stage,
    *,
    buffered: bool,
    chunks: bool,
    swarm: Swarm,
) -> dict[str, Any]:
    """Return settings for gradient buffers, offloading and gather chunks."""
    return {
        "reduce_buffer_elems": bucket_size(choices, sizes) if buffered else None,
        "arena": swarm.on("arena", fits=stage > 1 and not buffered),
        "step_buffer_elems": bucket_size(choices, sizes) if swarm.on("step buffer") else None,
        "contiguous_grads": not swarm.on("not contiguous", fits=buffered),
        "offload_state": swarm.on("offloaded"),
        "gather_chunk_elems": choices.integer(1, max(2, sum(sizes))) if chunks else None,
    }


def _drawn_stage(choices: Choices, swarm: Swarm) -> Stage:
    """Draw a stage, mostly 1 if the target supports this stage."""
    stages = swarm.able.stages
    higher = [stage for stage in stages if stage > 1]
    higher = [stage for stage in higher if stage in swarm.theme.stages] or higher
    chosen: Stage = stages[0] if 1 not in stages else 1
    if 0 in stages and len(stages) > 1 and swarm.on("stage 0"):
        chosen = 0
    if higher and len(stages) > 1 and swarm.on("stage 2 or 3"):
        # Stage 3 twice as often, because it has the most code that can fail.
        chosen = choices.among([*higher, *(stage for stage in higher if stage == 3)])
    return chosen


def drawn_reload(
    choices: Choices,
    *,
    before: Scenario,
    sizes: Sequence[int],
    ranks_max: int,
    swarm: Swarm,
) -> ReloadSpec:
    """Draw a checkpoint within a run of at least two steps, and the layout that loads it.

    Args:
        choices: Source of choices.
        before: The case without the checkpoint. Its tp, cp and pp stay.
        sizes: Elements of each param.
        ranks_max: Maximum ranks after the reload. A single data-parallel rank is always possible.
        swarm: Features of the case.
    """
    model, system, topology = before.model, before.system, before.topology
    parts = topology.tp * topology.pp
    most = min(ranks_max // parts, swarm.able.world_size_max or ranks_max)
    ranks = topology.cp * choices.integer(1, max(1, most // topology.cp))
    ep = choices.among(shares(model, ranks, swarm=swarm))
    both = len(swarm.able.stages) > 1
    stage = _other_stage(choices, system, swarm) if both and swarm.on("other stage") else None
    has_replicas = stage is None and system.stage > 0 and swarm.follows("system.redundancy")
    # Only padded partitions can be aligned.
    padded = system.align_elems == system.align_bytes == 1 and stage != 0
    # The ranks with the same experts are divided among replicas.
    redundancy = choices.among(divisors(ranks // ep)) if has_replicas else 1
    buckets = bucket_size(choices, sizes) if swarm.on("other buckets") else None
    partition: PartitionName | None = None
    if padded and system.stage > 0 and swarm.on("other partition"):
        partition = choices.among(["padded", "uneven", "one-owner"])
    elif stage == 0:
        # Stage 0 has no partition, so use the default.
        partition = "padded"
    after = system.stage if stage is None else stage
    # Stage 2 needs a sum after every micro-batch; see `_other_stage`.
    could = after == 1 or (after == 2 and system.sync == "every")
    buffered = swarm.on("other reduce buffers", fits=could and system.sum_by != "first-rank")
    if buffered or (system.reduce_buffer_elems is not None and after in (1, 2)):
        # With reduce buffers, sums reach a single owner, not its replicas.
        redundancy = 1
    if buckets not in (None, 1) and partition is None and system.partition == "rows":
        # `rows` excludes buckets with several params.
        partition = "one-owner"
    if partition == "one-owner" and system.gather_chunk_elems is not None:
        # Gathers in chunks need a shard of every bucket on every rank.
        partition = "uneven"
    return replace(
        _drawn_checkpoint(choices, before, swarm),
        world_size=ranks * parts,
        stage=stage,
        ep=ep,
        redundancy=redundancy,
        bucket_elems=buckets,
        partition=partition,
        reduce_buffer_elems=bucket_size(choices, sizes) if buffered else None,
        param_order=_other_order(system) if swarm.on("other param order") else None,
    )


def _other_stage(choices: Choices, system: SystemSpec, swarm: Swarm) -> Stage | None:
    # Only stages 1 and 2 gather all params after a step. If the case overlaps this gather, it keeps
    # to these stages.
    kept = (1, 2) if system.overlap_params else (0, 1, 2, 3)
    # Stage 2 keeps no gradients for the next micro-batch, so reduce buffers need a sum after every
    # micro-batch.
    if system.reduce_buffer_elems is not None and system.sync == "last":
        kept = tuple(stage for stage in kept if stage != 2)
    others = [stage for stage in swarm.able.stages if stage in kept and stage != system.stage]
    return choices.among(others) if others else None


def _drawn_checkpoint(choices: Choices, before: Scenario, swarm: Swarm) -> ReloadSpec:
    """Draw step and kind of a checkpoint, for the same layout."""
    steps, is_frozen = before.run.steps, bool(before.model.freeze)
    step = choices.integer(1, steps - 1) if not is_frozen else choices.among(_late(steps))
    # Only a third, because asynchronous saves take additional steps.
    goes_on = swarm.on("saved async") and choices.integer(0, 2) == 2
    weights_only = swarm.on("weights only")
    # Draw these even for weights only, so that later draws keep their positions.
    lost_steps, lost_micro_batches = choices.among((0, 0, 1)), choices.among((0, 0, 1))
    return ReloadSpec(
        step=step,
        async_steps=choices.integer(1, steps - step) if goes_on else 0,
        form=choices.among(["sharded", "sharded", "consolidated"]),
        weights_only=weights_only,
        lost_steps=0 if weights_only else lost_steps,
        lost_micro_batches=lost_micro_batches,
        early_save=choices.among((False, True)),
    )


def _late(steps: int) -> list[int]:
    """Return the steps after which to save a checkpoint, where late steps are repeated."""
    # Late, so that a param that was frozen at first trains before the checkpoint.
    return [step for step in range(1, steps) for _ in range(step)]


def _other_order(system: SystemSpec) -> Literal["registration", "reverse"]:
    return "registration" if system.param_order == "reverse" else "reverse"


def with_drawn_options(choices: Choices, scenario: Scenario, *, target: Target) -> Scenario:
    """Return the case with some of the target's own options. A third of the cases have none.

    Args:
        choices: Source of choices.
        scenario: The case without these options.
        target: Target with the options.

    Raises:
        ProtocolError: An option's values and its default differ in type.
    """
    options = options_of(target)
    if not options or not choices.among((False, True, True)):
        return scenario
    drawn_options: dict[str, str] = {}
    for name, option in options.items():
        if option.fits is not None and option.fits(scenario):
            continue
        # 0 means the default, so that cases shrink to it. All values are equally likely.
        count = len(option.values) if isinstance(option.values, Sequence) else 1
        is_other = choices.integer(0, count) > 0
        value = _value(choices, name, option, target) if is_other else option.default
        if type(value) is not type(option.default):
            raise ProtocolError(
                f"expected option {name!r} of target {target.name!r} to draw values like its "
                f"default, {option.default!r}, got {value!r}."
            )
        if value != option.default:
            choices.note(f"option {name}")
            drawn_options[name] = written(value)
    return with_options(scenario, drawn_options) if drawn_options else scenario


def _value(choices: Choices, name: str, option: Option, target: Target) -> OptionValue:
    values = option.values
    if isinstance(values, st.SearchStrategy):
        return choices.of(values)
    if isinstance(values, Sequence) and not isinstance(values, str):
        return choices.among(list(values) or [option.default])
    raise ProtocolError(
        f"expected values of option {name!r} of target {target.name!r} to be a tuple or a "
        f"Hypothesis strategy, got {values!r}."
    )
