"""Measurements of what zero_sim costs, as medians and as ratios taken in one run.

Machines are noisy: a ratio compares two things that were timed in turns; an absolute figure tells
only about the machine it was taken on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import hypothesis
import torch
import torch.distributed as dist
from hypothesis.strategies import SearchStrategy

from zero_sim.backends import WorldPool
from zero_sim.errors import LayoutError
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.layouts import Layout, layouts
from zero_sim.fuzz.strategies import scenarios
from zero_sim.report.records import Measurement
from zero_sim.run import run_case
from zero_sim.run.real_judge import on_workers
from zero_sim.run.setup import Setup
from zero_sim.scenario.spec import (
    DataSpec,
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    WorldSpec,
)
from zero_sim.sim import World, WorldFailure
from zero_sim.targets import find_target
from zero_sim.workloads import Workload, build_workload


def _measured(name: str, value: float, unit: str, *, goal: float) -> Measurement:
    return Measurement(name=name, value=round(value, 4), unit=unit, goal=goal, ok=value <= goal)


def _shown(name: str, value: float, unit: str) -> Measurement:
    return Measurement(name=name, value=round(value, 4), unit=unit)


def _measured_least(name: str, value: float, unit: str, *, goal: float) -> Measurement:
    """Of something that is to be large."""
    return Measurement(
        name=name, value=round(value, 4), unit=unit, goal=goal, ok=value >= goal, at_least=True
    )


def run_benchmarks() -> Iterator[Measurement]:
    """Take every measurement, one after another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield _measured("warm all_reduce, 4 ranks", _warm_all_reduce(4, 200) * 1e3, "ms", goal=1.0)
        yield _measured("warm all_reduce, 1024 ranks", _warm_all_reduce(1024, 5), "s", goal=1.0)
        yield _measured("case: 4 ranks, 3 steps, hidden 8", _small_case() * 1e3, "ms", goal=20.0)
        gloo, ratio = _real_case()
        yield _measured("the same on warm gloo workers", gloo * 1e3, "ms", goal=50.0)
        yield _measured_least("gloo workers over simulated", ratio, "x", goal=3.0)
        for hidden, goal in ((256, 1.2), (8, 2.0)):
            ratio = _overhead(hidden)
            yield _measured(f"ranks over plain loop, hidden {hidden}", ratio, "x", goal=goal)
        yield _measured("mismatch named, 2 ranks", _failing_run(2) * 1e3, "ms", goal=10.0)
        yield _measured("deadlock explained, 64 ranks", _failing_run(64) * 1e3, "ms", goal=100.0)
        for name, world in (
            ("lazy timing", WorldSpec(size=4, timing="lazy")),
            ("hostile timing", WorldSpec(size=4, timing="hostile")),
            ("race detector", WorldSpec(size=4, races=True)),
        ):
            yield _shown(f"{name} over none, hidden 8", _cost_of(world), "x")
        yield _measured("peak memory over what 4 ranks hold", _memory_ratio(), "x", goal=1.1)
        yield _measured_least("drawn cases, 2 to 8 ranks", _cases_rate(100), "a second", goal=50.0)
        yield _measured_least("drawn layouts", _layouts_rate(3000), "a second", goal=1000.0)
    finally:
        torch.set_num_threads(threads)


def _median_seconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _all_reduce_program(rank: int) -> float:
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return x.item()


def _warm_all_reduce(world_size: int, repeats: int) -> float:
    with World(world_size) as world:
        world.run(_all_reduce_program)
        return _median_seconds(lambda: world.run(_all_reduce_program), repeats)


def _mlp(hidden: int, *, size: int = 4, steps: int = 3, rows: int = 4) -> Scenario:
    return Scenario(
        schema=1,
        name="bench",
        model=ModelSpec(name="mlp", hidden=hidden, blocks=2),
        data=DataSpec(rows=rows),
        world=WorldSpec(size=size),
        optimizer=OptimizerSpec(name="adamw"),
        run=RunSpec(steps=steps),
    )


def _small_case() -> float:
    scenario = _mlp(8)
    with WorldPool() as pool:
        run_case(scenario, pool=pool)
        return _median_seconds(lambda: run_case(scenario, pool=pool), 40)


def _failing_run(world_size: int) -> float:
    """A whole run that ends with a mismatch of two ranks, or with one of many that never comes."""

    def program(rank: int) -> None:
        if world_size > 2 and rank == 1:
            return
        dist.all_reduce(torch.ones(1 + (rank == 1)))

    with World(world_size) as world:
        world.run(_all_reduce_program)

        def run() -> None:
            with contextlib.suppress(WorldFailure):
                world.run(program)

        return _median_seconds(run, 20)


def _cost_of(world: WorldSpec) -> float:
    """The small case on such a world, over the same on a plain one."""
    plain = _mlp(8)
    other = dataclasses.replace(plain, world=world)
    with WorldPool() as pool:
        ratios = []
        for _ in range(15):
            one, two = (
                _median_seconds(functools.partial(run_case, scenario, pool=pool), 1)
                for scenario in (plain, other)
            )
            ratios.append(two / one)
    return statistics.median(ratios)


def _real_case() -> tuple[float, float]:
    """Seconds of the small case on gloo workers, and how often the simulated one fits into it."""
    scenario = _mlp(8)
    real, ratios = [], []
    with WorldPool() as pool, on_workers(Setup(backend="gloo")) as judge:
        run_case(scenario, pool=pool)
        judge(scenario)
        for _ in range(40):
            on_gloo = _median_seconds(lambda: judge(scenario), 1)
            simulated = _median_seconds(lambda: run_case(scenario, pool=pool), 1)
            real.append(on_gloo)
            ratios.append(on_gloo / simulated)
    return statistics.median(real), statistics.median(ratios)


def _overhead(hidden: int) -> float:
    """Training on simulated ranks, over the same work done rank after rank in a plain loop."""
    scenario = _mlp(hidden, steps=20 if hidden < 64 else 5, rows=16 if hidden < 64 else 64)
    workload = build_workload(scenario)
    for rank in range(scenario.world.size):
        for step in range(scenario.run.steps):
            workload.batch(step=step, rank=rank, micro=0)
    with World(scenario.world.size) as world:
        simulated, plain = [], []
        for _ in range(9):
            simulated.append(_simulated_seconds(world, scenario, workload))
            plain.append(_plain_seconds(scenario, workload))
    return statistics.median(a / b for a, b in zip(simulated, plain, strict=True))


def _simulated_seconds(world: World, scenario: Scenario, workload: Workload) -> float:
    target = find_target("zero_sim")
    times: list[float] = []

    def program(rank: int) -> None:
        assert dist.group.WORLD is not None
        engine = target.build(workload.build(), scenario=scenario, group=dist.group.WORLD)
        dist.barrier()
        times.append(time.perf_counter())
        for step in range(scenario.run.steps):
            engine.zero_grad()
            batch = workload.batch(step=step, rank=rank, micro=0)
            loss = workload.loss(engine.module, batch)
            engine.backward(loss, last_micro=True, rows=batch.rows)
            engine.step(lr_factor=1.0)
        times.append(time.perf_counter())

    world.run(program)
    return max(times) - min(times)


def _plain_seconds(scenario: Scenario, workload: Workload) -> float:
    """Forward, backward and a rank's share of the optimizer, once a rank, without communication."""
    size = scenario.world.size
    modules = [workload.build() for _ in range(size)]
    numel = sum(param.numel() for param in modules[0].parameters())
    masters = [torch.zeros(-(-numel // size), requires_grad=True) for _ in range(size)]
    optimizers = [torch.optim.AdamW([master], foreach=False) for master in masters]
    started = time.perf_counter()
    for step in range(scenario.run.steps):
        for rank, module in enumerate(modules):
            module.zero_grad()
            workload.loss(module, workload.batch(step=step, rank=rank, micro=0)).backward()
            masters[rank].grad = torch.zeros_like(masters[rank])
            optimizers[rank].step()
    return time.perf_counter() - started


def _cases_rate(count: int) -> float:
    """Drawn cases a second, drawing included, on warm worlds; the second time that they are run."""
    cases_from = scenarios(ranks_max=8, steps_max=5).filter(lambda case: case.world.size > 1)
    with WorldPool() as pool:
        run = functools.partial(run_case, pool=pool)
        _cases_seconds(cases_from, run, count)
        return count / _cases_seconds(cases_from, run, count)


def _cases_seconds(
    cases_from: SearchStrategy[Scenario], run: Callable[[Scenario], object], count: int
) -> float:
    started = time.perf_counter()
    for case in itertools.islice(draws(cases_from, seed="bench"), count):
        run(case)
    return time.perf_counter() - started


def _layouts_rate(count: int) -> float:
    """Layouts a second that are drawn, planned and seen to give every element one owner."""
    seen = 0

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=count,
        phases=(hypothesis.Phase.generate,),
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(layouts())
    def cover_all(layout: Layout) -> None:
        nonlocal seen
        seen += 1
        require_cover(layout)

    started = time.perf_counter()
    cover_all()
    return seen / (time.perf_counter() - started)


def require_cover(layout: Layout) -> None:
    """Refuse a drawn layout in which some element of a param has no owner, or two.

    Raises:
        LayoutError: Names the first such element.
    """
    _, policy, buffers = layout
    for buffer in buffers:
        for bucket in buffer.buckets:
            reached = bucket.span.start
            for shard in range(policy.shard_count):
                for fragment in bucket.fragments(shard):
                    if fragment.in_buffer.start != reached:
                        raise LayoutError(
                            f"Expected element {reached} to be owned once, but bucket "
                            f"{bucket.index} of buffer {buffer.key} goes on with {fragment}."
                        )
                    reached = fragment.in_buffer.stop
            if reached != bucket.padding.start:
                raise LayoutError(
                    f"Expected an owner of every element, but nobody has those from {reached} to "
                    f"{bucket.padding.start} of buffer {buffer.key}."
                )


def _memory_ratio() -> float:
    """Peak growth of a fresh process that trains 4 ranks, over the tensors that they keep."""
    done = subprocess.run(
        [sys.executable, "-c", "from zero_sim.bench import print_memory; print_memory()"],
        check=True,
        capture_output=True,
        text=True,
        # Without a fixed threshold glibc keeps freed tensors in its heap and fragments it; what is
        # asked here is what is in use.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    return float(done.stdout)


def print_memory() -> None:
    """Body of the process that `_memory_ratio` starts."""
    torch.set_num_threads(1)
    warm = _mlp(8)
    with WorldPool() as pool:
        run_case(warm, pool=pool)
    scenario = _mlp(1024, steps=2, rows=2)
    workload = build_workload(scenario)
    module = workload.build()
    numel = sum(param.numel() for param in module.parameters())
    size = scenario.world.size
    held_bytes = size * 8 * numel + 12 * numel  # fp32 params and grads; masters and moments sharded
    del module
    before_bytes = _resident_bytes()
    with World(size) as world:
        _simulated_seconds(world, scenario, workload)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(f"{(peak_bytes - before_bytes) / held_bytes}\n")


def _resident_bytes() -> int:
    """Memory that the process holds right now; Linux."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
