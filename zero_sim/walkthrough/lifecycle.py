"""Lifecycle of stage 3's units in a step: their states and the live bytes at each moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from zero_sim.calculators.ledger import Sample
from zero_sim.calculators.memory_meter import MemoryMeter, sample_at_modules
from zero_sim.layout import LayoutPolicy
from zero_sim.report.area_chart import Chart, Point
from zero_sim.report.walks import Cell, Mark, Step, Table, Walk
from zero_sim.sim import CollectiveRecord, World
from zero_sim.sim.call import Call
from zero_sim.targets.held import memory_of
from zero_sim.walkthrough import prose
from zero_sim.zero import DistributedDataParallel, DistributedOptimizer, ZeroConfig

# Small enough for a table, but with enough layers to show prefetch and reduction together.
RANKS, LAYERS, WIDTH, ROWS = 2, 4, 8, 3
_MARKS: dict[str, Mark] = {
    "sharded": "",
    "gathering": "got",
    "whole": "own",
    "in use": "own",
    "updated shard": "new",
    "empty": "",
    "filling": "own",
    "reducing": "sent",
    "reduced": "done",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Rank 0's state at a moment."""

    sample: Sample
    params: tuple[str, ...]
    """Each unit's param state."""
    grads: tuple[str, ...]
    """Each unit's gradient state."""


def run_step(*, prefetch: int) -> Sequence[Moment]:
    """Train a chain of linear layers, a unit each; return rank 0's moments in the second step."""
    # The second step, because optimizer state and buffers exist from its start.
    moments: list[Moment] = []
    meters = [MemoryMeter() for _ in range(RANKS)]

    def called(record: CollectiveRecord, call: Call) -> None:
        meters[record.rank].sample(f"{record.kind} of {record.elems} {record.dtype} is called")

    with World(RANKS) as world:

        def program(rank: int) -> None:
            # All ranks share the log's watch; each record contains its rank.
            world.log.watch = called
            with meters[rank].watching():
                # All shards are equally long, so rank 0 stands for every rank.
                _train(meters[rank], prefetch=prefetch, moments=moments if rank == 0 else [])

        world.run(program)
        world.log.watch = None
    return moments


def _train(meter: MemoryMeter, *, prefetch: int, moments: list[Moment]) -> None:
    """Build the model and its system, and train two steps."""
    # Equal params on all ranks. Their values do not change the number of bytes.
    torch.manual_seed(0)
    module = nn.Sequential()
    for number in range(1, LAYERS + 1):
        module.add_module(f"layer_{number}", nn.Linear(WIDTH, WIDTH))
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    # A bucket closes after a layer's bias, so that each layer is a unit.
    layout = LayoutPolicy(bucket_elems=WIDTH * WIDTH + 1)
    config = ZeroConfig(stage=3, layout=layout, overlap_grads=True, prefetch=prefetch)
    ddp = DistributedDataParallel(module, config=config, group=group)
    optimizer = DistributedOptimizer(ddp, optim_factory=_adam)
    units = [unit for buffer in ddp.buffers for unit in buffer.units]

    def note(sample: Sample) -> None:
        params = tuple(unit.param_state.value for unit in units)
        grads = tuple(unit.grad_state.value for unit in units)
        moments.append(Moment(sample=sample, params=params, grads=grads))

    meter.named = lambda: memory_of(ddp, optimizer)
    meter.on_sample = note
    sample_at_modules(meter, module)
    for step in range(2):
        meter.is_sampling = step == 1
        meter.phase = "data"
        optimizer.zero_grad()
        inputs = torch.randn(ROWS, WIDTH)
        # A step has a single micro-batch, so this is also the last.
        ddp.begin_last_micro_batch()
        meter.phase = "forward"
        loss = module(inputs).square().mean()
        meter.phase = "backward"
        loss.backward()
        ddp.end_micro_batch(True)
        # Release them as a usual training loop does, or they would be live in the optimizer step.
        del loss, inputs
        meter.phase = "step"
        optimizer.step()
    meter.end()


def _adam(params: ParamsT) -> Optimizer:
    return torch.optim.Adam(params, lr=1e-3)


def walk_lifecycle() -> Walk:
    """Return the walkthrough."""
    ahead, late = run_step(prefetch=1), run_step(prefetch=0)
    whole = (WIDTH * WIDTH + WIDTH) * torch.float32.itemsize
    steps = [
        *_steps(ahead, prefetch=1, number=1),
        *_steps(late, prefetch=0, number=len(ahead) + 1),
        _compared(ahead, late),
    ]
    return prose.walk(
        "lifecycle",
        steps,
        layers=LAYERS,
        width=WIDTH,
        ranks=RANKS,
        whole=whole,
        shard=whole // RANKS,
        late=len(ahead) + 1,
    )


def _steps(moments: Sequence[Moment], *, prefetch: int, number: int) -> list[Step]:
    """Return the steps in a run.

    Args:
        moments: Rank 0's moments.
        prefetch: Number of units gathered ahead.
        number: The first step's number in the walkthrough.
    """
    # Compare the first moment with itself, so that no unit counts as changed.
    where = [_where(moment, moments[max(0, at - 1)]) for at, moment in enumerate(moments)]
    points = [
        Point(
            name=f"{number + index}. {where[index]}",
            phase=moment.sample.phase,
            amounts=moment.sample.bytes,
        )
        for index, moment in enumerate(moments)
    ]
    return [
        Step(
            title=f"{'With' if prefetch else 'Without'} prefetch, {moment.sample.phase}: "
            f"{where[index]}",
            text=[_said(moment)],
            tables=[_states(moment), _live(moment)],
            chart=Chart(title="Live bytes of rank 0", unit="bytes", points=points, now=index),
        )
        for index, moment in enumerate(moments)
    ]


def _where(moment: Moment, before: Moment) -> str:
    """Return a description of a moment, with the units that its call moves."""
    # These are the units whose state changed since the previous moment.
    begun = [
        f"layer_{i + 1}"
        for i, states in enumerate(zip(moment.params, moment.grads, strict=True))
        for state, was in zip(states, (before.params[i], before.grads[i]), strict=True)
        if state != was and state in ("gathering", "reducing")
    ]
    kind, _, rest = moment.sample.where.partition(" of ")
    if not begun or not rest.endswith("is called"):
        return moment.sample.where
    return f"{kind} for {', '.join(begun)}, {rest.removesuffix(' is called')}, is called"


def _said(moment: Moment) -> str:
    """Return a sentence about the live memory other than shards."""
    whole = [f"layer_{i + 1}" for i, state in enumerate(moment.params) if state == "whole"]
    coming = [f"layer_{i + 1}" for i, state in enumerate(moment.params) if state == "gathering"]
    grads = [f"layer_{i + 1}" for i, state in enumerate(moment.grads) if state == "filling"]
    flying = [f"layer_{i + 1}" for i, state in enumerate(moment.grads) if state == "reducing"]
    parts = [
        f"{what} {', '.join(names)}"
        for what, names in (
            ("unsharded params:", whole),
            ("params being gathered:", coming),
            ("gradients being computed:", grads),
            ("unsharded gradients being reduced:", flying),
        )
        if names
    ]
    return f"Live besides the shards: {'; '.join(parts)}." if parts else "Only shards are live."


def _states(moment: Moment) -> Table:
    rows = [
        [f"layer_{index + 1}", Cell(params, _MARKS[params]), Cell(grads, _MARKS[grads])]
        for index, (params, grads) in enumerate(zip(moment.params, moment.grads, strict=True))
    ]
    return prose.table("lifecycle.states", rows)


def _live(moment: Moment) -> Table:
    meaning = prose.entry_of("lifecycle.categories")
    rows = [
        [name.replace("_", " "), f"{size:,}", meaning.get(name, "")]
        for name, size in moment.sample.bytes.items()
    ]
    return prose.table("lifecycle.live", [*rows, ["all", f"{moment.sample.total:,}", ""]])


def _compared(ahead: Sequence[Moment], late: Sequence[Moment]) -> Step:
    rows = []
    for name, moments in (("with prefetch", ahead), ("without", late)):
        gathered = [moment.sample.bytes.get("gathered", 0) for moment in moments]
        # Categories are absent at moments without such memory.
        whole = [moment.sample.bytes.get("whole_gradients", 0) for moment in moments]
        peak = max(moments, key=lambda moment: moment.sample.total)
        rows.append(
            [name, f"{max(gathered):,}", f"{max(whole):,}", f"{peak.sample.total:,}",
             f"{peak.sample.phase}: {peak.sample.where}"]
        )  # fmt: skip
    return prose.step("lifecycle.compared", [prose.table("lifecycle.compared", rows)])
