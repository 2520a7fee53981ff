"""ZeRO-1 with the 260-parameter transformer on 2 ranks: who owns what, one step, all values.

The gradients of `W_q` are given, as are its values and the first input row; all else that is shown
is what the system had, read on each rank while it ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
from zero_sim.targets.own import ZeroSimTarget
from zero_sim.targets.protocol import OwnedPart
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


@dataclass(slots=True)
class Run:
    """What one rank had of `W_q`, at each point of the step."""

    own_grad: Tensor | None = None
    grad_after: Tensor | None = None
    before: Tensor | None = None
    half: Tensor | None = None
    """Its working param when its owner had stepped and nothing was gathered."""
    after: Tensor | None = None
    parts: dict[str, OwnedPart] = field(default_factory=dict)
    calls: list[CollectiveRecord] = field(default_factory=list)


def run_step() -> Sequence[Run]:
    """One step of both ranks, on the given gradients of `W_q` alone."""
    workload = build_workload(SCENARIO)
    runs = [Run() for _ in range(RANKS)]
    working: dict[int, Tensor] = {}

    def called(record: CollectiveRecord) -> None:
        run = runs[record.rank]
        run.calls.append(record)
        if record.kind == "all_gather":
            run.half = working[record.rank].detach().clone()

    with World(RANKS) as world:

        def program(rank: int) -> None:
            run, group = runs[rank], dist.group.WORLD
            assert isinstance(group, dist.ProcessGroup)
            engine = ZeroSimTarget().build(workload.build(), scenario=SCENARIO, group=group)
            engine.zero_grad()
            param = dict(engine.module.named_parameters())["W_q"]
            working[rank] = param
            run.before = param.detach().clone()
            world.log.watch = called
            given = torch.tensor(W_Q_GRADS[rank]).to(torch.bfloat16)
            run.own_grad = given
            engine.backward((param * given).sum(), last_micro=True, rows=1)
            engine.step(lr_factor=1.0)
            run.after = param.detach().clone()
            run.parts = {part.place.param: _kept(part) for part in engine.parts()}
            run.grad_after = None if "W_q" not in run.parts else run.parts["W_q"].grad

        world.run(program)
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
    return Walk(
        title="ZeRO-1 with 260 params on 2 ranks",
        about="A tiny transformer: width 4, two heads of 2, an inner layer of 16, 8 tokens. bf16 "
        "params and gradients, fp32 masters, Adam (lr 0.001, betas 0.9 and 0.999, eps 1e-8). Every "
        "value was read from a run of zero_sim's own system in the simulated world.",
        steps=[
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
    first = cut[0]
    assert first.flat_start is not None
    return Step(
        title="Who owns what",
        text=[
            f"All params lie in one flat buffer of {offset} elements. Each rank owns half of it: "
            f"it alone has masters and Adam's state of these {totals[0]} elements.",
            f"The boundary cuts W_1 after its first {cut[0].stop} elements: rank 0 owns these, "
            f"rank 1 the other {cut[1].stop - cut[1].start}. Element {totals[0] - 1} of the buffer "
            f"is rank 0's last, element {totals[0] - 1 - first.flat_start} of W_1 (counted from "
            f"0), and element {totals[0]} is rank 1's first.",
            f"Cutting W_1 in equal halves of 32, as is sometimes told, would give rank 0 "
            f"{totals[0] - cut[0].stop + 32} elements and rank 1 "
            f"{totals[1] - (cut[1].stop - cut[1].start) + 32}: shards are cut in the flat buffer, "
            "not in params.",
        ],
        tables=[
            Table(
                head=("param", "in the buffer", "rank 0", "rank 1"),
                rows=rows,
                marks={"own": "owned whole", "sent": "owned in part"},
            )
        ],
    )


def _forward() -> Step:
    row = torch.tensor(INPUT_ROW_0)
    mean, deviation = row.mean().item(), row.std(correction=0).item()
    ones, zeros = torch.ones(WIDTH), torch.zeros(WIDTH)
    normal = normalise(row, weight=ones, bias=zeros)
    query = normal @ torch.tensor(W_Q)
    wrong = 0.398
    return Step(
        title="Forward, for the first input row",
        text=[
            f"The row has mean {mean:.3f} and standard deviation {deviation:.4f}: the root of the "
            f"mean of the squared differences. A value of {wrong}, which is sometimes told, is "
            "wrong, and so is what follows from it.",
            "Every rank computes this with all of W_q: stage 1 shards no params.",
        ],
        tables=[
            Table(
                head=("", *map(str, range(WIDTH))),
                rows=[
                    ["input", *_row(row)],
                    ["normalised", *_row(normal)],
                    [f"if divided by {wrong}", *_row((row - mean) / wrong, mark="wrong")],
                    ["query: normalised @ W_q", *_row(query, mark="new")],
                ],
                marks={"new": "what comes out", "wrong": "not so"},
            )
        ],
    )


def _own_gradients(runs: Sequence[Run]) -> Step:
    tables = []
    for rank, run in enumerate(runs):
        assert run.own_grad is not None
        tables.append(_matrix(run.own_grad, title=f"Gradient of W_q on rank {rank}"))
    return Step(
        title="Backward: each rank has a gradient of its own data",
        text=[
            "The gradients of the two ranks are given, and rounded to bf16, which keeps 8 bits: "
            "0.023 becomes "
            f"{torch.tensor(0.023).to(torch.bfloat16).item():.6f}."
        ],
        tables=tables,
    )


def _reduced(runs: Sequence[Run]) -> Step:
    total = runs[0].grad_after
    assert total is not None
    mean = total.float() / RANKS
    return Step(
        title="Reduce-scatter: each owner gets the sum of its own elements",
        text=[
            "One collective moves half of each rank's buffer to the other. W_q, elements [8, 24), "
            "is rank 0's: there the sum arrives, added in bf16. Rank 1 has no sum of W_q, and "
            "needs none. The owner divides by two, in fp32."
        ],
        tables=[
            _matrix(total.view(WIDTH, WIDTH), title="Sum on rank 0", mark="got"),
            _matrix(mean.view(WIDTH, WIDTH), title="Mean, as fp32", mark="new"),
        ],
    )


def _one_element(runs: Sequence[Run]) -> Step:
    part, spec = runs[0].parts["W_q"], SCENARIO.optimizer
    total = runs[0].grad_after
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
    return Step(
        title="Adam on one element: W_q[0, 0], on its owner, rank 0",
        text=[
            "Adam's first step moves an element by the learning rate, whatever its gradient's size."
        ],
        tables=[Table(head=("", "value", "how"), rows=rows)],
    )


def _stepped(runs: Sequence[Run]) -> Step:
    part = runs[0].parts["W_q"]
    return Step(
        title="The owner steps its masters",
        text=["All 16 elements of W_q, in fp32, on rank 0. Rank 1 has none of this."],
        tables=[
            _matrix(torch.tensor(W_Q), title="W_q before, as given"),
            _matrix(part.master.view(WIDTH, WIDTH), title="Masters after", mark="new"),
            _matrix(part.state["exp_avg"].view(WIDTH, WIDTH), title="First moments"),
        ],
    )


def _half(runs: Sequence[Run]) -> Step:
    tables = []
    for rank, run in enumerate(runs):
        assert run.half is not None
        assert run.before is not None
        tables.append(_changed(run.half, run.before, title=f"W_q on rank {rank}"))
    return Step(
        title="Half new, half old",
        text=[
            "Read on both ranks when each came to the all-gather. Owners have cast their masters "
            "into their half of the params, and nobody has the other half yet: rank 0 has the new "
            "W_q, rank 1 the old one. A forward now would compute with params of two steps."
        ],
        tables=tables,
    )


def _gathered(runs: Sequence[Run]) -> Step:
    tables = []
    for rank, run in enumerate(runs):
        assert run.after is not None
        assert run.before is not None
        tables.append(_changed(run.after, run.before, title=f"W_q on rank {rank}"))
    same = torch.equal(*(run.after for run in runs if run.after is not None))
    return Step(
        title="All-gather: every rank has all params again",
        text=[f"The same bits on both ranks: {'yes' if same else 'no'}."],
        tables=tables,
    )


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
    return Step(
        title="What it saves",
        text=[
            f"Bytes of one rank between two steps: {shared.total:,} of {whole.total:,}, "
            f"{1 - shared.total / whole.total:.1%} less. Masters and moments are 12 of 16 bytes a "
            "param, and each rank keeps half of them."
        ],
        tables=[Table(head=("", "without ZeRO", "ZeRO-1"), rows=rows)],
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
    buffers = [record.bytes for record in runs[0].calls if record.kind == "reduce_scatter"]
    return Step(
        title="What it moves",
        text=[
            "The calls of rank 0 in the step, from the event log. An all-gather contributes what "
            "the rank owns.",
            f"Counted by buffers, {buffers[0]} bytes of gradients and as many of params, "
            f"{2 * buffers[0]:,} either way: an all-reduce is a reduce-scatter and an all-gather. "
            "A ring of two sends half of that from each rank.",
        ],
        tables=[Table(head=("call", "contributed", "bytes", "sent in a ring"), rows=table)],
    )


def _matrix(values: Tensor, *, title: str, mark: Mark = "") -> Table:
    rows = [[f"row {index}", *_row(row, mark=mark)] for index, row in enumerate(values)]
    return Table(head=("", *map(str, range(values.shape[1]))), rows=rows, title=title)


def _changed(now: Tensor, before: Tensor, *, title: str) -> Table:
    rows: list[list[Cell | str]] = []
    for index in range(now.shape[0]):
        cells: list[Cell | str] = [f"row {index}"]
        for new, old in zip(now[index].tolist(), before[index].tolist(), strict=True):
            cells.append(Cell(f"{new:.5f}", "new" if new != old else "sent"))
        rows.append(cells)
    marks: Mapping[Mark, str] = {"new": "new", "sent": "as before"}
    head = ("", *map(str, range(now.shape[1])))
    return Table(head=head, rows=rows, title=title, marks=marks)


def _row(values: Tensor, *, mark: Mark = "") -> list[Cell]:
    return [Cell(f"{value:.4f}", mark) for value in values.float().tolist()]
