"""ZeRO-1 with the 260-parameter transformer on 2 ranks: who owns what, one step, all values.

The gradients of `W_q` are given, as are its values and the first input row; all else that is shown
is what the system had, read on each rank while it ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zero_sim.calculators.footprint import footprint_of
from zero_sim.calculators.network import Network
from zero_sim.calculators.traffic import traffic_of
from zero_sim.cost.forms import sizes_of
from zero_sim.report.walks import Cell, Mark, Step, Table, Walk
from zero_sim.scenario.spec import ModelSpec, OptimizerSpec, Scenario, SystemSpec
from zero_sim.sim import CollectiveRecord, World
from zero_sim.sim.call import Call
from zero_sim.targets.own import ZeroSimTarget
from zero_sim.targets.protocol import OwnedPart
from zero_sim.walkthrough import prose
from zero_sim.workloads import build_workload
from zero_sim.workloads.transformer import (
    INPUT_ROW_0,
    SHAPES,
    W_Q,
    W_Q_GRADS,
    WIDTH,
    normalise,
)

RANKS = 2
SCENARIO = Scenario(
    schema=1,
    name="walkthrough",
    model=ModelSpec(name="transformer-260", dtype="bf16"),
    optimizer=OptimizerSpec(name="adam", lr=1e-3),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Values of `W_q` on one rank at each point of the step, its parts after it, and its calls."""

    own_grad: Tensor
    before: Tensor
    half: Tensor
    """The working param after its owner has stepped and before anything is gathered."""
    after: Tensor
    parts: Mapping[str, OwnedPart]
    calls: Sequence[CollectiveRecord]


def run_step() -> Sequence[Run]:
    """One step of both ranks, on the given gradients of `W_q` alone."""
    workload = build_workload(SCENARIO)
    calls: list[list[CollectiveRecord]] = [[] for _ in range(RANKS)]
    working: dict[int, Tensor] = {}
    halves: dict[int, Tensor] = {}

    def called(record: CollectiveRecord, call: Call) -> None:
        calls[record.rank].append(record)
        if record.kind == "all_gather":
            halves[record.rank] = working[record.rank].detach().clone()

    with World(RANKS) as world:

        def program(rank: int) -> Run:
            group = dist.group.WORLD
            assert isinstance(group, dist.ProcessGroup)
            engine = ZeroSimTarget().build(workload.build(), scenario=SCENARIO, group=group)
            engine.zero_grad()
            param = dict(engine.module.named_parameters())["W_q"]
            working[rank] = param
            before = param.detach().clone()
            world.log.watch = called
            given = torch.tensor(W_Q_GRADS[rank]).to(torch.bfloat16)
            engine.backward((param * given).sum(), last_micro=True, rows=1)
            engine.step(lr_factor=1.0)
            return Run(
                own_grad=given,
                before=before,
                half=halves[rank],
                after=param.detach().clone(),
                parts={part.place.param: _kept(part) for part in engine.parts()},
                calls=calls[rank],
            )

        runs = world.run(program)
        world.log.watch = None
    return runs


def _kept(part: OwnedPart) -> OwnedPart:
    """A part as it is now: the run's memory goes with its world."""
    return OwnedPart(
        place=part.place,
        grad=None if part.grad is None else part.grad.clone(),
        master=part.master.clone(),
        state={name: value.clone() for name, value in part.state.items()},
    )


def walk_zero1() -> Walk:
    """The walk."""
    runs = run_step()
    return prose.walk(
        "zero1",
        [
            _owners(runs),
            _forward(),
            _own_gradients(runs),
            _reduced(runs),
            _one_element(runs),
            _stepped(runs),
            _half(runs),
            _gathered(runs),
            _bytes(),
            _traffic(runs),
        ],
    )


def _owners(runs: Sequence[Run]) -> Step:
    rows: list[list[Cell | str]] = []
    offset = 0
    for name, shape in SHAPES.items():
        elems = torch.Size(shape).numel()
        cells: list[Cell | str] = [name, f"[{offset}, {offset + elems})"]
        for run in runs:
            part = run.parts.get(name)
            if part is None:
                cells.append("")
                continue
            place = part.place
            assert place.flat_start is not None
            count = place.stop - place.start
            stop = place.flat_start + count
            mark: Mark = "own" if count == elems else "sent"
            cells.append(Cell(f"{count}: [{place.flat_start}, {stop})", mark))
        rows.append(cells)
        offset += elems
    totals = [sum(p.place.stop - p.place.start for p in run.parts.values()) for run in runs]
    rows.append(["all", f"[0, {offset})", *(str(total) for total in totals)])
    cut = [run.parts["W_1"].place for run in runs]
    cut_elems = [place.stop - place.start for place in cut]
    assert cut[0].flat_start is not None
    return prose.step(
        "zero1.owners",
        [prose.table("zero1.owners", rows)],
        elems=offset,
        owned=totals,
        cut=cut_elems,
        last=totals[0] - 1,
        last_of_param=totals[0] - 1 - cut[0].flat_start,
        halved=[total - elems + 32 for total, elems in zip(totals, cut_elems, strict=True)],
    )


def _forward() -> Step:
    row = torch.tensor(INPUT_ROW_0)
    mean, deviation = row.mean().item(), row.std(correction=0).item()
    ones, zeros = torch.ones(WIDTH), torch.zeros(WIDTH)
    normal = normalise(row, weight=ones, bias=zeros)
    query = normal @ torch.tensor(W_Q)
    wrong = 0.398
    rows = [
        ["input", *_row(row)],
        ["normalised", *_row(normal)],
        [f"if divided by {wrong}", *_row((row - mean) / wrong, mark="wrong")],
        ["query: normalised @ W_q", *_row(query, mark="new")],
    ]
    table = prose.table("zero1.forward", rows, head=_columns(WIDTH))
    return prose.step("zero1.forward", [table], mean=mean, deviation=deviation, wrong=wrong)


def _own_gradients(runs: Sequence[Run]) -> Step:
    tables = [
        _matrix(run.own_grad, title=f"Gradient of W_q on rank {rank}")
        for rank, run in enumerate(runs)
    ]
    rounded = torch.tensor(0.023).to(torch.bfloat16).item()
    return prose.step("zero1.own_gradients", tables, rounded=rounded)


def _reduced(runs: Sequence[Run]) -> Step:
    total = runs[0].parts["W_q"].grad
    assert total is not None
    mean = total.float() / RANKS
    return prose.step(
        "zero1.reduced",
        [
            _matrix(total.view(WIDTH, WIDTH), title="Sum on rank 0", mark="got"),
            _matrix(mean.view(WIDTH, WIDTH), title="Mean, as fp32", mark="new"),
        ],
    )


def _one_element(runs: Sequence[Run]) -> Step:
    part, spec = runs[0].parts["W_q"], SCENARIO.optimizer
    total = part.grad
    assert total is not None
    gradient = (total[0].float() / RANKS).item()
    m, v = part.state["exp_avg"][0].item(), part.state["exp_avg_sq"][0].item()
    beta1, beta2 = spec.betas
    m_hat, v_hat = m / (1 - beta1), v / (1 - beta2)
    before = torch.tensor(W_Q).to(torch.bfloat16).float()[0, 0].item()
    rows = [
        ["gradient g", f"{gradient:.8f}", "the mean over ranks"],
        ["m", f"{m:.8f}", f"{1 - beta1:.1f} g"],
        ["v", f"{v:.4e}", f"{1 - beta2:.3f} g^2"],
        ["m_hat", f"{m_hat:.8f}", f"m / (1 - {beta1})"],
        ["v_hat", f"{v_hat:.4e}", f"v / (1 - {beta2})"],
        [
            "step",
            f"{spec.lr * m_hat / (v_hat**0.5 + spec.eps):.8f}",
            "lr m_hat / (v_hat^0.5 + eps)",
        ],
        ["master before", f"{before:.8f}", "0.12 in bf16"],
        ["master after", f"{part.master[0].item():.8f}", "before - step"],
        ["working param", f"{part.master[0].to(torch.bfloat16).item():.8f}", "that in bf16"],
    ]
    return prose.step("zero1.one_element", [prose.table("zero1.one_element", rows)])


def _stepped(runs: Sequence[Run]) -> Step:
    part = runs[0].parts["W_q"]
    return prose.step(
        "zero1.stepped",
        [
            _matrix(torch.tensor(W_Q), title="W_q before, as given"),
            _matrix(part.master.view(WIDTH, WIDTH), title="Masters after", mark="new"),
            _matrix(part.state["exp_avg"].view(WIDTH, WIDTH), title="First moments"),
        ],
    )


def _half(runs: Sequence[Run]) -> Step:
    return prose.step(
        "zero1.half", [_changed(run.half, run, rank) for rank, run in enumerate(runs)]
    )


def _gathered(runs: Sequence[Run]) -> Step:
    tables = [_changed(run.after, run, rank) for rank, run in enumerate(runs)]
    same = torch.equal(runs[0].after, runs[1].after)
    return prose.step("zero1.gathered", tables, same="yes" if same else "no")


def _bytes() -> Step:
    sizes = sizes_of(build_workload(SCENARIO).build())
    plain = Scenario(
        schema=1, model=SCENARIO.model, optimizer=SCENARIO.optimizer, system=SystemSpec(stage=0)
    )
    whole, shared = (
        footprint_of(sizes, scenario=scenario, rank=0) for scenario in (plain, SCENARIO)
    )
    rows = [
        [name, f"{whole.held[name]:,}", f"{shared.held[name]:,}"]
        for name in whole.held
        if whole.held[name]
    ]
    rows.append(["all", f"{whole.total:,}", f"{shared.total:,}"])
    return prose.step(
        "zero1.bytes",
        [prose.table("zero1.bytes", rows)],
        sharded=shared.total,
        whole=whole.total,
        saved=1 - shared.total / whole.total,
    )


def _traffic(runs: Sequence[Run]) -> Step:
    sizes = sizes_of(build_workload(SCENARIO).build())
    traffic = traffic_of(sizes, scenario=SCENARIO, rank=0, network=Network())
    rows = [
        [record.kind, f"{record.elems:,} {record.dtype}", f"{record.bytes:,}"]
        for record in runs[0].calls
    ]
    sent = {flow.kind: f"{int(flow.total_sent):,}" for flow in traffic.flows}
    table = [[*row, sent[row[0]]] for row in rows]
    buffer = next(record.bytes for record in runs[0].calls if record.kind == "reduce_scatter")
    return prose.step(
        "zero1.traffic", [prose.table("zero1.traffic", table)], buffer=buffer, both=2 * buffer
    )


def _columns(count: int) -> list[str]:
    return ["", *map(str, range(count))]


def _matrix(values: Tensor, *, title: str, mark: Mark = "") -> Table:
    rows = [[f"row {index}", *_row(row, mark=mark)] for index, row in enumerate(values)]
    return Table(head=_columns(values.shape[1]), rows=rows, title=title)


def _changed(now: Tensor, run: Run, rank: int) -> Table:
    rows: list[list[Cell | str]] = []
    for index in range(now.shape[0]):
        cells: list[Cell | str] = [f"row {index}"]
        for new, old in zip(now[index].tolist(), run.before[index].tolist(), strict=True):
            cells.append(Cell(f"{new:.5f}", "new" if new != old else "sent"))
        rows.append(cells)
    title = f"W_q on rank {rank}"
    return prose.table("zero1.changed", rows, head=_columns(now.shape[1]), title=title)


def _row(values: Tensor, *, mark: Mark = "") -> list[Cell]:
    return [Cell(f"{value:.4f}", mark) for value in values.float().tolist()]
