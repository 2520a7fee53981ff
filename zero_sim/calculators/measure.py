"""Measuring runs: a case's memory and calls in a step on simulated ranks, without a judge."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_sim.backends.worlds import WorldPool
from zero_sim.calculators.counted import Model
from zero_sim.calculators.footprint import footprint_of
from zero_sim.calculators.ledger import RankLedger, differences
from zero_sim.calculators.memory_meter import MemoryMeter, Named, named_by_torch, sample_at_modules
from zero_sim.calculators.network import Network
from zero_sim.calculators.traffic import Traffic, traffic_in
from zero_sim.cost.calls import planned_calls
from zero_sim.cost.checkpoints import checkpoint_bytes
from zero_sim.cost.forms import ParamSize, sizes_of
from zero_sim.errors import EnvironmentProblem
from zero_sim.run.dp_cp_groups import DpCpGroup, dp_cp_groups_of
from zero_sim.run.program import draw_batch, lr_factor, start_step
from zero_sim.run.rank_local import rank_local_state
from zero_sim.scenario.derived import own_micro_batches
from zero_sim.scenario.spec import Scenario
from zero_sim.sim import CollectiveRecord
from zero_sim.sim.call import Call
from zero_sim.sim.log import EventLog
from zero_sim.targets import Target, complete, find_target
from zero_sim.targets.protocol import CostedEngine, Engine, NamedMemoryEngine
from zero_sim.workloads import Batch, Workload, build_module, build_workload, make_distinct

_UNREPORTED = ("sums", "gathered", "whole_gradients")
"""Categories that only the system itself can distinguish from other memory."""
SPARE = 1.25
"""Factor from the closed forms to a run's memory, for activations and copies in flight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A case's memory and calls in the measured step."""

    scenario: Scenario
    step: int
    """Index of the measured step."""
    ledgers: Sequence[RankLedger]
    """Ledgers in world rank order."""
    records: Mapping[int, Sequence[CollectiveRecord]]
    """Calls in the step, up to the next forward, by world rank."""
    sizes: Mapping[int, tuple[ParamSize, ...]]
    """Params that each rank trained, by world rank."""
    groups: Sequence[DpCpGroup]
    is_costed: bool
    """True if the system declares that its costs follow the closed forms."""
    log: EventLog

    def traffic(self, rank: int, *, network: Network) -> Traffic:
        """Return a world rank's traffic in the step."""
        return traffic_in(self.records[rank], network=network)

    def differences(self) -> Iterator[str]:
        """Yield a message for each difference between closed forms and measurement."""
        # Other systems may have other buckets and calls, so nothing is checked.
        if not self.is_costed:
            return
        for group in self.groups:
            for index, rank in enumerate(group.ranks):
                case, sizes = group.scenario, self.sizes[rank]
                footprint = footprint_of(sizes, scenario=case, rank=index)
                yield from differences(self.ledgers[rank], footprint)
                yield from self._other_calls(group, index)
                kept = self.ledgers[rank].peak_of("checkpoints").bytes.get("checkpoints", 0)
                wanted = checkpoint_bytes(case, rank=index)
                if kept != wanted:
                    yield (
                        f"expected a peak of {wanted} bytes of checkpoints by closed form, "
                        f"got {kept} on rank {rank}"
                    )

    def _other_calls(self, group: DpCpGroup, index: int) -> Iterator[str]:
        rank = group.ranks[index]
        # The model-parallel group: the ranks at this index in all dp-cp groups.
        parts = tuple(each.ranks[index] for each in self.groups)
        planned = planned_calls(self.sizes[rank], scenario=group.scenario, rank=index)
        # A multiset, because the closed form has no call order.
        wanted: Counter[tuple[str, tuple[int, ...], int, str]] = Counter()
        for call, count in planned.items():
            at = parts if call.among == "parts" else tuple(group.ranks[i] for i in call.ranks)
            wanted[call.kind, at, call.elems, call.dtype] += count
        made = Counter((r.kind, r.group_ranks, r.elems, r.dtype) for r in self.records[rank])
        for what, counts in (("too many", made - wanted), ("missing", wanted - made)):
            for (kind, at, elems, dtype), count in counts.items():
                yield (
                    f"expected the calls of the closed form on rank {rank}, got {what}: {count} x "
                    f"{kind} of {elems} {dtype} elements among ranks {at}"
                )


def measure(scenario: Scenario, *, target: Target | None = None) -> Measured:
    """Run a case and measure its last step.

    Args:
        scenario: A validated case.
        target: The system; by default the target in the scenario.

    Raises:
        RankFailed: If a rank raised an error.
        WorldFailure: If the world failed, for example in a deadlock.
        EnvironmentProblem: If the system's package is not installed.
    """
    case = _plain(scenario)
    system = target or find_target(case.system.target)
    own = rank_local_state(system, ranks_max=case.world.size)
    groups = dp_cp_groups_of(case)
    workloads = [build_workload(group.scenario) for group in groups]
    ranks: dict[int, _Rank] = {}
    # As in judged runs. Restored below, because the caller's process may do other work.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with WorldPool() as pool, nullcontext() if own is None else own.installed():
            world = pool.world_for(case)
            world.keep_apart(None if own is None else own.own)

            def program(rank: int) -> None:
                group, workload, process_group = _place(rank, groups, workloads)
                world.log.watch = called
                ranks[rank] = _Rank(rank=rank, log=world.log)
                with nullcontext() if own is None else own.in_rank():
                    ranks[rank].run(
                        group.scenario,
                        workload,
                        system=system,
                        group=process_group,
                        tp_index=group.tp_index,
                    )

            def called(record: CollectiveRecord, call: Call) -> None:
                # Calls that create groups come before the rank's meter exists.
                if record.rank in ranks:
                    ranks[record.rank].called(record)

            world.run(program)
            log = world.log
            log.watch = None
    finally:
        torch.set_num_threads(threads)
    return Measured(
        scenario=case,
        step=_looked_at(case),
        ledgers=[ranks[rank].ledger() for rank in sorted(ranks)],
        records={rank: each.records() for rank, each in ranks.items()},
        sizes={rank: each.sizes for rank, each in ranks.items()},
        groups=groups,
        is_costed=all(each.is_costed for each in ranks.values()),
        log=log,
    )


def check_fits(model: Model, *, available: int | None = None) -> None:
    """Check that a run with all ranks fits into this machine's memory.

    Args:
        model: Model and ranks.
        available: Bytes that the run may use; by default the free memory.

    Raises:
        EnvironmentProblem: If the run does not fit. The message suggests a number of params.
    """
    free = _free_bytes() if available is None else available
    # All simulated ranks live in this process, so their peaks add up.
    sizes, ranks = model.laid_out(), model.scenario.world.size
    each = footprint_of(sizes, scenario=model.scenario, rank=0).peak
    needed = round(ranks * each * SPARE)
    if needed <= free:
        return
    params = model.elems * free // needed
    raise EnvironmentProblem(
        f"expected a run that fits into the {free / 1e9:.1f} GB of free memory, got {ranks} ranks "
        f"of {each / 1e9:.1f} GB each, about {needed / 1e9:.1f} GB together. Try about "
        f"{params:,} params, or omit --measure: closed forms need no memory."
    )


def _free_bytes() -> int:
    # Free pages only, without memory that caches could give back.
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _plain(scenario: Scenario) -> Scenario:
    """Return the case without faults, reload, frozen params and loss scale; at most 2 steps."""
    # Faults and skipped steps change calls and memory. A reload may change the world size, so the
    # run ends before it.
    steps = scenario.run.steps
    if scenario.reload is not None:
        steps = scenario.reload.step
    return replace(
        scenario,
        faults=(),
        reload=None,
        model=replace(scenario.model, freeze=()),
        data=replace(scenario.data, nan=None),
        optimizer=replace(scenario.optimizer, loss_scale=None),
        run=replace(scenario.run, steps=min(2, steps)),
    )


def _looked_at(scenario: Scenario) -> int:
    # The last of at most two steps. In the second step all optimizer state exists, and leaks show.
    return scenario.run.steps - 1


def _place(
    rank: int, groups: Sequence[DpCpGroup], workloads: Sequence[Workload]
) -> tuple[DpCpGroup, Workload, dist.ProcessGroup]:
    if len(groups) == 1:
        assert isinstance(dist.group.WORLD, dist.ProcessGroup)
        return groups[0], workloads[0], dist.group.WORLD
    # Every rank creates all groups in the same order, as new_group() requires.
    made = [dist.new_group(list(group.ranks)) for group in groups]
    mine = next(i for i, group in enumerate(groups) if rank in group.ranks)
    own = made[mine]
    assert isinstance(own, dist.ProcessGroup)
    return groups[mine], workloads[mine], own


class _Rank:
    def __init__(self, *, rank: int, log: EventLog) -> None:
        self._rank = rank
        self._log = log
        self._window = (0, 0)
        self._meter = MemoryMeter()
        self._names_memory = False
        self.sizes: tuple[ParamSize, ...] = ()
        self.is_costed = False

    def run(
        self,
        scenario: Scenario,
        workload: Workload,
        *,
        system: Target,
        group: dist.ProcessGroup,
        tp_index: int = 0,
    ) -> None:
        """Train all steps in the case, and take samples in the measured step."""
        with ExitStack() as stack:
            stack.enter_context(self._meter.watching())
            # Build under the meter, which must see where params and buffers are allocated.
            index = group.rank()
            module = build_module(
                workload, expert_index=index % scenario.topology.ep, tp_index=tp_index
            )
            if scenario.model.distinct_start:
                make_distinct(module, rank=index, ep=scenario.topology.ep)
            self.sizes = sizes_of(module)
            built = system.build(module, scenario=scenario, group=group)
            self.is_costed = isinstance(built, CostedEngine)
            # Check before complete(), because an adapter has all optional methods.
            self._names_memory = isinstance(built, NamedMemoryEngine)
            self._meter.named = _names_of(built, module)
            sample_at_modules(self._meter, module)
            engine = complete(built)
            for step in range(scenario.run.steps):
                self._meter.is_sampling = step == _looked_at(scenario)
                start = len(self._log.collectives)
                engine.zero_grad()
                start_step(engine, workload, scenario, step=step, rank=index)
                for micro in range(scenario.run.micro_batches):
                    last = micro == scenario.run.micro_batches - 1
                    if micro >= own_micro_batches(scenario.run, step=step, rank=index):
                        self._meter.phase = "backward"
                        engine.join_micro_batch(last=last)
                        self._meter.sample("backward is over")
                        continue
                    batch = self._draw(workload, scenario, step=step, micro=micro, index=index)
                    engine.start_micro_batch(last=last)
                    loss = workload.loss(engine.forward, batch)  # pyrefly: ignore
                    self._meter.sample("forward is over")
                    self._meter.phase = "backward"
                    engine.backward(loss, last_micro=last, rows=batch.rows)
                    # The loss would keep graph and batch in memory in the next sample.
                    del batch, loss
                    self._meter.sample("backward is over")
                self._meter.phase = "step"
                engine.step(lr_factor=lr_factor(scenario, step))
                self._meter.sample("the optimizer's step is over")
                # Complete gathers left for the next forward, because they belong to this step.
                engine.settle()
                self._window = (start, len(self._log.collectives))
            # Free memory in reference cycles, which the step does not need.
            gc.collect()
            self._meter.end()

    def _draw(
        self, workload: Workload, scenario: Scenario, *, step: int, micro: int, index: int
    ) -> Batch:
        self._meter.phase = "data"
        batch = draw_batch(workload, scenario, step, index, micro)
        self._meter.phase = "forward"
        return batch

    def called(self, record: CollectiveRecord) -> None:
        """Take a sample at this rank's call."""
        self._meter.sample(f"{record.kind} of {record.elems:,} {record.dtype}")

    def ledger(self) -> RankLedger:
        """Return the ledger for the measured step."""
        return RankLedger(
            rank=self._rank,
            samples=self._meter.samples,
            unreported=() if self._names_memory else _UNREPORTED,
        )

    def records(self) -> list[CollectiveRecord]:
        """Return this rank's calls in the measured step."""
        start, stop = self._window
        return [each for each in self._log.collectives[start:stop] if each.rank == self._rank]


def _names_of(engine: Engine, module: nn.Module) -> Named:
    """Return the source of names: the engine's own report, else torch and the engine's parts."""

    def named() -> Iterator[tuple[str, Tensor]]:
        if isinstance(engine, NamedMemoryEngine):
            yield from (("frozen", p) for p in module.parameters() if not p.requires_grad)
            yield from engine.memory()
            return
        # An engine's optional `parts` contain its masters and state. Scalars are counters.
        for part in getattr(engine, "parts", tuple)():
            yield "masters", part.master
            yield from ((name, value) for name, value in part.state.items() if value.dim())
        # Last, because later names win: without separate masters, params count as params.
        yield from named_by_torch(module)

    return named
