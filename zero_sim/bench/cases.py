"""Figures for worlds, cases, layouts and training: processor time and ratios.

Processor time covers this process and all processes that it starts, and changes less on a busy
machine than the wall clock. The two parts of a ratio run in turns, so a slow machine affects both.
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
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import hypothesis
import torch
import torch.distributed as dist

from zero_sim.backends.worlds import WorldPool
from zero_sim.errors import LayoutError
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.layouts import Layout, layouts
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.rules.judging import EXPLAINER, run_case
from zero_sim.run.real_judge import on_workers
from zero_sim.run.setup import Setup
from zero_sim.scenario.dump import to_toml
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

Work = Callable[[], object]


def tree_seconds() -> float:
    """Return processor seconds of this process and its descendants, living or reaped."""
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time() + reaped.ru_utime + reaped.ru_stime
    return own + sum(map(_process_seconds, _descendants(os.getpid())))


def median_seconds(work: Work, repeats: int) -> float:
    """Return the median processor seconds of `work` in this process."""
    return statistics.median(_seconds(work) for _ in range(repeats))


def pairs(one: Work, other: Work, repeats: int) -> list[tuple[float, float]]:
    """Return processor seconds of two pieces of work done in turns, including descendants'."""
    taken = []
    for _ in range(repeats):
        began = tree_seconds()
        one()
        between = tree_seconds()
        other()
        taken.append((between - began, tree_seconds() - between))
    return taken


def ratio(taken: list[tuple[float, float]]) -> float:
    """Return the median quotient of first over second."""
    # Not a quotient of medians, because only the parts of a pair ran under the same load.
    return statistics.median(first / second for first, second in taken)


def _seconds(work: Work) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _descendants(pid: int) -> list[int]:
    """Return the ids of a process's descendants. Linux only."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The process name, in parentheses, may contain spaces and parentheses.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # The process has ended.
        children.setdefault(int(fields[1]), []).append(int(folder.name))
    found, waiting = [], [pid]
    while waiting:
        waiting_now = children.get(waiting.pop(), [])
        found += waiting_now
        waiting += waiting_now
    return found


def _process_seconds(pid: int) -> float:
    """Return processor seconds of all threads in a process so far; 0 if it has ended."""
    # schedstat counts nanoseconds. stat counts 10 ms ticks, too coarse for an all_reduce.
    nanoseconds = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            nanoseconds += int(task.read_text().split()[0])
        except (OSError, IndexError):
            continue  # The thread has ended.
    return nanoseconds / 1e9


_DRAWN = 100


def small_case(*, hidden: int = 8, steps: int = 3, rows: int = 4) -> Scenario:
    """Return the standard case: 4 ranks with a small network.

    Args:
        hidden: Layer width, in elements.
        steps: Optimizer steps.
        rows: Data rows per rank and step.
    """
    return Scenario(
        schema=1,
        name="bench",
        model=ModelSpec(name="mlp", hidden=hidden, blocks=2),
        data=DataSpec(rows=rows),
        world=WorldSpec(size=4),
        optimizer=OptimizerSpec(name="adamw"),
        run=RunSpec(steps=steps),
    )


def _all_reduce(rank: int) -> float:
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return x.item()


def all_reduce_seconds(world_size: int, repeats: int) -> float:
    """Return the seconds of an all_reduce on warm ranks."""
    with World(world_size) as world:
        # The first run starts the ranks.
        world.run(_all_reduce)
        return median_seconds(lambda: world.run(_all_reduce), repeats)


def case_seconds() -> float:
    """Return the seconds of the small case with all state judged."""
    scenario = small_case()
    with WorldPool() as pool:
        # The first run opens the world and fills caches.
        run_case(scenario, pool=pool)
        return median_seconds(lambda: run_case(scenario, pool=pool), 40)


def case_over_torch() -> float:
    """Return the small case's time over its work in plain torch: build, train, step a shard."""
    scenario = small_case()
    workload = build_workload(scenario)
    with WorldPool() as pool:
        run_case(scenario, pool=pool)
        judged = functools.partial(run_case, scenario, pool=pool)
        return ratio(pairs(judged, functools.partial(_train_plainly, scenario, workload), 30))


def failing_seconds(world_size: int) -> float:
    """Return the seconds of a failing run: 2 ranks mismatch, or one of many ranks is missing."""

    def program(rank: int) -> None:
        if world_size > 2 and rank == 1:
            return
        # Rank 1 has two elements, rank 0 has a single element.
        dist.all_reduce(torch.ones(1 + (rank == 1)))

    with World(world_size) as world:
        world.run(_all_reduce)

        def run() -> None:
            with contextlib.suppress(WorldFailure):
                world.run(program)

        return median_seconds(run, 20)


def cost_of(world: WorldSpec) -> float:
    """Return the small case's time in a world with these settings, over a plain world."""
    plain = small_case()
    other = dataclasses.replace(plain, world=world)
    with WorldPool() as pool:
        for scenario in (plain, other):
            run_case(scenario, pool=pool)
        one, two = (functools.partial(run_case, each, pool=pool) for each in (other, plain))
        return ratio(pairs(one, two, 15))


def gloo_figures(*, hidden: int = 8, repeats: int = 20) -> tuple[float, float, float]:
    """Return a case's processor seconds on gloo, and the ratio to simulated ranks, also by wall."""
    scenario = small_case(hidden=hidden)
    with WorldPool() as pool, on_workers(Setup(backend="gloo"), explainer=EXPLAINER) as judge:
        on_gloo = functools.partial(judge, scenario)
        simulated = functools.partial(run_case, scenario, pool=pool)
        # The first runs start worlds and workers, and fill caches.
        simulated()
        on_gloo()
        taken = pairs(on_gloo, simulated, repeats)
        walls = [_wall_seconds(on_gloo) / _wall_seconds(simulated) for _ in range(repeats)]
    return statistics.median(one for one, _ in taken), ratio(taken), statistics.median(walls)


def _wall_seconds(work: functools.partial[object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def overhead(hidden: int) -> float:
    """Return the time of training on simulated ranks, over a plain loop over ranks."""
    scenario = small_case(
        hidden=hidden, steps=20 if hidden < 64 else 5, rows=16 if hidden < 64 else 64
    )
    workload = build_workload(scenario)
    # Warm up the draws, which both sides need.
    for rank in range(scenario.world.size):
        for step in range(scenario.run.steps):
            workload.batch(step=step, rank=rank, micro=0)
    with World(scenario.world.size) as world:
        ratios = [
            simulated_seconds(world, scenario, workload) / _train_plainly(scenario, workload)
            for _ in range(9)
        ]
    return statistics.median(ratios)


def simulated_seconds(world: World, scenario: Scenario, workload: Workload) -> float:
    """Return the seconds of all training steps on simulated ranks, without a judge."""
    target = find_target("zero_sim")
    times: list[float] = []
    # All ranks share the process clock, so measure from the first start to the last end.

    def program(rank: int) -> None:
        assert dist.group.WORLD is not None
        engine = target.build(workload.build(), scenario=scenario, group=dist.group.WORLD)
        # Wait for all engines, so that their construction does not count.
        dist.barrier()
        times.append(time.process_time())
        for step in range(scenario.run.steps):
            engine.zero_grad()
            batch = workload.batch(step=step, rank=rank, micro=0)
            loss = workload.loss(engine.module, batch)
            engine.backward(loss, last_micro=True, rows=batch.rows)
            engine.step(lr_factor=1.0)
        times.append(time.process_time())

    world.run(program)
    return max(times) - min(times)


def _train_plainly(scenario: Scenario, workload: Workload) -> float:
    """Train rank by rank without communication; each rank steps its share of the params.

    Returns:
        Processor seconds, without construction.
    """
    size = scenario.world.size
    modules = [workload.build() for _ in range(size)]
    numel = sum(param.numel() for param in modules[0].parameters())
    # A rank's share, rounded up for padding.
    masters = [torch.zeros(-(-numel // size), requires_grad=True) for _ in range(size)]
    optimizers = [torch.optim.AdamW([master], foreach=False) for master in masters]
    started = time.process_time()
    for step in range(scenario.run.steps):
        for rank, module in enumerate(modules):
            module.zero_grad()
            workload.loss(module, workload.batch(step=step, rank=rank, micro=0)).backward()
            # Zeros, because a step's time does not depend on values.
            masters[rank].grad = torch.zeros_like(masters[rank])
            optimizers[rank].step()
    return time.process_time() - started


def drawn_seconds() -> tuple[float, float]:
    """Return mean seconds for drawing and judging a case on warm worlds, and for drawing alone."""
    cases_from = drawn_cases(ranks_max=8, steps_max=5).filter(lambda case: case.world.size > 1)
    with WorldPool() as pool:
        # Run once without measuring, to open worlds of all sizes.
        for case in itertools.islice(draws(cases_from, seed="bench"), _DRAWN):
            run_case(case, pool=pool)
        began = time.process_time()
        cases = list(itertools.islice(draws(cases_from, seed="bench"), _DRAWN))
        drawn = time.process_time()
        for case in cases:
            run_case(case, pool=pool)
    return (time.process_time() - began) / _DRAWN, (drawn - began) / _DRAWN


def layouts_rate(count: int) -> float:
    """Return how many layouts per second are drawn, planned and checked for unique owners."""
    seen = 0

    # A fixed seed, so that all runs draw the same layouts.
    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=count,
        # Only generate: no shrinking, database or time limits.
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

    started = time.process_time()
    cover_all()
    return seen / (time.process_time() - started)


def require_cover(layout: Layout) -> None:
    """Check that every param element has exactly one owner.

    Raises:
        LayoutError: An element has no owner, or two. The message names the first such element.
    """
    _, policy, buffers = layout
    for buffer in buffers:
        for bucket in buffer.buckets:
            reached = bucket.span.start
            for shard in range(policy.shard_count):
                for fragment in bucket.fragments(shard):
                    if fragment.in_buffer.start != reached:
                        raise LayoutError(
                            f"expected element {reached} to be owned once, got bucket "
                            f"{bucket.index} of buffer {buffer.key}, which has {fragment} next."
                        )
                    reached = fragment.in_buffer.stop
            if reached != bucket.padding.start:
                raise LayoutError(
                    f"expected an owner of every element, got none for "
                    f"[{reached}, {bucket.padding.start}) of buffer {buffer.key}."
                )


def first_verdict_seconds() -> float:
    """Return the seconds of `zero-sim run` with one case, including imports."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "case.toml")
        path.write_text(to_toml(small_case()))
        command = [sys.executable, "-m", "zero_sim", "run", str(path), "--no-bundles"]
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(Path(folder, "compiled"))}
        # With this variable, each run would compile the modules again.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)

        def judge() -> float:
            began = tree_seconds()
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
            return tree_seconds() - began

        # The first run compiles the modules, so it is not measured.
        judge()
        # The minimum, because noise only adds time.
        return min(judge() for _ in range(3))
