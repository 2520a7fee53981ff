"""ZeRO-1 with the 260-parameter transformer on 2 ranks: a whole step, number by number.

Every value is read from the system on each rank during the run. A second pass uses the figures in
the document that defines the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from zero_sim.calculators.footprint import footprint_of
from zero_sim.calculators.network import Network
from zero_sim.calculators.traffic import traffic_of
from zero_sim.cost.forms import sizes_of
from zero_sim.findings.buffer_map import map_buffer
from zero_sim.report.svg_buffer_map import buffer_map_pictures
from zero_sim.report.walks import Cell, Mark, Step, Table, Walk
from zero_sim.scenario.spec import Scenario, SystemSpec
from zero_sim.walkthrough import prose
from zero_sim.walkthrough.document import document_steps
from zero_sim.walkthrough.matrices import (
    MarkOf,
    by_head,
    by_param,
    columns,
    flat,
    matrix,
    number,
)
from zero_sim.walkthrough.tiny_step import RANKS, RankStep, owned, run_step, scenario_of
from zero_sim.workloads import build_workload
from zero_sim.workloads.transformer import GIVEN, HEADS, SHAPES, W_Q

# bf16, so that fp32 masters differ visibly from working params.
SCENARIO = scenario_of("bf16")
# Offset of `W_q` in the flat buffer, in elements.
_W_Q_AT = 8


def walk_zero1() -> Walk:
    """Return the walkthrough."""
    runs = run_step(SCENARIO)
    steps = [
        _owners(runs),
        _start(runs),
        *_forward(runs),
        _loss(runs),
        _gradients(runs),
        _buffer(runs),
        _reduced(runs),
        _one_element(runs),
        _stepped(runs),
        _half(runs),
        _gathered(runs),
        _bytes(),
        _traffic(runs),
    ]
    return prose.walk("zero1", [*steps, *document_steps(runs)])


def _owners(runs: Sequence[RankStep]) -> Step:
    rows: list[list[Cell | str]] = []
    offset = 0
    for name, shape in SHAPES.items():
        elems = torch.Size(shape).numel()
        row: list[Cell | str] = [name, f"[{offset}, {offset + elems})"]
        for run in runs:
            part = run.parts.get(name)
            if part is None:
                row.append("")
                continue
            place = part.place
            assert place.flat_start is not None
            count = place.stop - place.start
            stop = place.flat_start + count
            # A param that crosses the boundary has elements on both ranks.
            mark: Mark = "own" if count == elems else "sent"
            row.append(Cell(f"{count}: [{place.flat_start}, {stop})", mark))
        rows.append(row)
        offset += elems
    totals = _totals(runs)
    rows.append(["all", f"[0, {offset})", *(str(total) for total in totals)])
    # The boundary cuts W_1, so both ranks have a part of it.
    cut = [run.parts["W_1"].place for run in runs]
    assert cut[0].flat_start is not None
    return prose.step(
        "zero1.owners",
        [prose.table("zero1.owners", rows)],
        elems=offset,
        owned=totals,
        cut=[place.stop - place.start for place in cut],
        last=totals[0] - 1,
        last_of_param=totals[0] - 1 - cut[0].flat_start,
    )


def _start(runs: Sequence[RankStep]) -> Step:
    names = [name for name, shape in SHAPES.items() for _ in range(torch.Size(shape).numel())]

    def mark_of(index: int) -> Mark:
        return "own" if names[index] in GIVEN else "sent" if names[index] in _DRAWN else ""

    # Both ranks start with equal params, so rank 0's are enough.
    title = "Params, the same on both ranks"
    params = by_param("zero1.start", runs[0].before, title=title, mark_of=mark_of)
    inputs = [
        matrix(run.batch.inputs[0], title=f"Inputs of rank {rank}", mark="sent" if rank else "own")
        for rank, run in enumerate(runs)
    ]
    targets = [_targets(run).tolist() for run in runs]
    return prose.step(
        "zero1.start",
        [params, *inputs],
        seed=SCENARIO.run.seed,
        targets=targets,
        exact=W_Q[0][0],
        rounded=number(runs[0].before[_W_Q_AT].item(), digits=8),
    )


# Drawn params. All others are given, or start at 1 (norm weights) or 0 (biases).
_DRAWN = ("W_o", "W_1", "W_2")

# Tables in `prose.toml`, with the activations to show and their titles.
_FORWARD: Sequence[tuple[str, Sequence[tuple[str, str]]]] = (
    ("norm_1", [("norm 1", "Normalised")]),
    ("projections", [("Q", "Q"), ("K", "K"), ("V", "V")]),
    ("scores", [("scores", "Scores, a row for each query")]),
    ("softmax", [("softmax", "Weights of attention")]),
    ("mix", [("mix", "Mix, heads joined again")]),
    ("residual_1", [("W_o", "Mix @ W_o"), ("residual 1", "Added to the input")]),
    ("norm_2", [("norm 2", "Normalised")]),
    (
        "ffn",
        [
            ("inner", "Inner layer: normalised @ W_1 + b_1"),
            ("relu", "After ReLU"),
            ("FFN", "ReLU @ W_2 + b_2"),
            ("residual 2", "Added to the input of the FFN's norm"),
        ],
    ),
    ("logits", [("logits", "Logits")]),
)


def _forward(runs: Sequence[RankStep]) -> list[Step]:
    steps = [
        prose.step(f"zero1.{entry}", [
            _activation(run.activations[name], f"{title}, rank {rank}")
            for rank, run in enumerate(runs)
            for name, title in shown
        ])
        for entry, shown in _FORWARD
    ]  # fmt: skip
    heads = [
        by_head(run.activations[name].unflatten(1, (HEADS, -1)).transpose(0, 1),
                title=f"{name} by heads, rank {rank}")
        for rank, run in enumerate(runs)
        for name in ("Q", "K", "V")
    ]  # fmt: skip
    # Splitting into heads computes nothing, so it has no activation. Show it before the scores.
    at = [entry for entry, _ in _FORWARD].index("scores")
    return [*steps[:at], prose.step("zero1.heads", heads), *steps[at:]]


def _activation(values: Tensor, title: str) -> Table:
    return by_head(values, title=title) if values.dim() == 3 else matrix(values, title=title)


def _loss(runs: Sequence[RankStep]) -> Step:
    tables = []
    for rank, run in enumerate(runs):
        # [tokens, vocabulary], in fp32 as in the loss itself.
        probabilities = run.activations["logits"].float().softmax(-1)
        rows: list[list[Cell | str]] = []
        for token, (row, target) in enumerate(zip(probabilities, _targets(run), strict=True)):
            values = [
                Cell(number(value), "got" if index == target else "")
                for index, value in enumerate(row.tolist())
            ]
            rows.append([f"token {token}", *values, number(-row[target].log().item())])
        head = [*columns(probabilities.shape[1]), "loss"]
        title = f"Probabilities, rank {rank}"
        tables.append(prose.table("zero1.loss", rows, head=head, title=title))
    losses = [number(run.loss.item(), digits=6) for run in runs]
    return prose.step("zero1.loss", tables, losses=losses)


def _gradients(runs: Sequence[RankStep]) -> Step:
    mark_of = _owner_marks(runs)
    return prose.step(
        "zero1.gradients",
        [
            by_param("zero1.buffer", run.grads, title=f"Gradients on rank {rank}", mark_of=mark_of)
            for rank, run in enumerate(runs)
        ],
    )


def _buffer(runs: Sequence[RankStep]) -> Step:
    mark_of = _owner_marks(runs)
    places = {rank: [part.place for part in run.parts.values()] for rank, run in enumerate(runs)}
    return prose.step(
        "zero1.buffer",
        [
            flat("zero1.buffer", run.grads, title=f"Buffer of rank {rank}", mark_of=mark_of)
            for rank, run in enumerate(runs)
        ],
        picture=buffer_map_pictures(map_buffer(places)),
        elems=len(runs[0].grads),
        owned=_totals(runs),
        cut=[run.parts["W_1"].place.stop - run.parts["W_1"].place.start for run in runs],
    )


def _reduced(runs: Sequence[RankStep]) -> Step:
    # Sums exist only on their owners, so join them.
    total = owned(runs, lambda part: part.grad)
    return prose.step(
        "zero1.reduced",
        [flat("zero1.buffer", total, title="Sums, each on its owner", mark_of=_owner_marks(runs))],
        owned=_totals(runs),
    )


def _one_element(runs: Sequence[RankStep]) -> Step:
    part, spec = runs[0].parts["W_q"], SCENARIO.optimizer
    total = part.grad
    assert total is not None
    own = [run.grads[_W_Q_AT].item() for run in runs]
    # The owner divides the bf16 sum in fp32.
    gradient = total[0].float().item() / RANKS
    m, v = part.state["exp_avg"][0].item(), part.state["exp_avg_sq"][0].item()
    beta1, beta2 = spec.betas
    # At step 1, bias correction restores m_hat = g and v_hat = g^2.
    m_hat, v_hat = m / (1 - beta1), v / (1 - beta2)
    # eps is added to the root, not inside it, as in torch.optim.Adam.
    step = spec.lr * m_hat / (v_hat**0.5 + spec.eps)
    rows = [
        ["gradient of rank 0", number(own[0]), "bf16"],
        ["gradient of rank 1", number(own[1]), "bf16"],
        ["sum", number(total[0].item()), "of both, in bf16"],
        ["g", number(gradient, digits=6), "sum / 2, in fp32"],
        ["m", number(m, digits=6), f"{1 - beta1:.1f} g"],
        ["v", number(v, digits=6), f"{1 - beta2:.3f} g^2"],
        ["m_hat", number(m_hat, digits=6), f"m / (1 - {beta1})"],
        ["v_hat", number(v_hat, digits=6), f"v / (1 - {beta2})"],
        ["step", number(step, digits=6), "lr m_hat / (v_hat^0.5 + eps)"],
        ["master before", number(runs[0].before[_W_Q_AT].item(), digits=8), f"{W_Q[0][0]} in bf16"],
        ["master after", number(part.master[0].item(), digits=8), "before - step"],
        ["working param", number(runs[0].after[_W_Q_AT].item(), digits=8), "that in bf16"],
    ]
    return prose.step("zero1.one_element", [prose.table("zero1.one_element", rows)])


def _stepped(runs: Sequence[RankStep]) -> Step:
    mark_of = _owner_marks(runs)
    shown = (
        ("First moments m", owned(runs, lambda part: part.state["exp_avg"]), 4),
        ("Second moments v", owned(runs, lambda part: part.state["exp_avg_sq"]), 4),
        # Four digits distinguish bf16 values, but masters are fp32.
        ("Masters after the step, fp32", owned(runs, lambda part: part.master), 5),
    )
    return prose.step(
        "zero1.stepped",
        [
            flat("zero1.buffer", values, title=title, mark_of=mark_of, digits=digits)
            for title, values, digits in shown
        ],
        owned=_totals(runs),
    )


def _half(runs: Sequence[RankStep]) -> Step:
    """Return the working params between the optimizer and the all-gather."""
    boundary = _totals(runs)[0]
    tables = []
    for rank, run in enumerate(runs):
        # An owned element has no mark if its step is lost in bf16 rounding.
        is_new = (run.half != run.before).tolist()

        def mark_of(at: int, rank: int = rank, is_new: Sequence[bool] = is_new) -> Mark:
            # `sent` marks the other rank's elements, which this rank receives in the all-gather.
            return "sent" if (at >= boundary) != bool(rank) else "new" if is_new[at] else ""

        title = f"Working params on rank {rank}"
        tables.append(flat("zero1.half", run.half, title=title, mark_of=mark_of))
    return prose.step("zero1.half", tables)


def _gathered(runs: Sequence[RankStep]) -> Step:
    # Both ranks have equal params again, so show rank 0's.
    is_new = (runs[0].after != runs[0].before).tolist()
    table = flat(
        "zero1.gathered",
        runs[0].after,
        title="Working params on both ranks",
        mark_of=lambda at: "new" if is_new[at] else "",
    )
    same = torch.equal(runs[0].after, runs[1].after)
    return prose.step(
        "zero1.gathered",
        [table],
        same="yes" if same else "no",
        elems=len(is_new),
        new=sum(is_new),
    )


def _bytes() -> Step:
    sizes = sizes_of(build_workload(SCENARIO).build())
    # The same model without ZeRO, for comparison.
    plain = Scenario(
        schema=1, model=SCENARIO.model, optimizer=SCENARIO.optimizer, system=SystemSpec(stage=0)
    )
    whole, shared = (
        footprint_of(sizes, scenario=scenario, rank=0) for scenario in (plain, SCENARIO)
    )
    rows = [
        [name, f"{whole.held[name]:,}", f"{shared.held[name]:,}"]
        for name in whole.held
        # Omit categories without memory.
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


def _traffic(runs: Sequence[RankStep]) -> Step:
    sizes = sizes_of(build_workload(SCENARIO).build())
    traffic = traffic_of(sizes, scenario=SCENARIO, rank=0, network=Network())
    rows = [
        [record.kind, f"{record.elems:,} {record.dtype}", f"{record.bytes:,}"]
        for record in runs[0].calls
    ]
    # Bytes that rank 0 sends on a ring, by kind.
    sent = {flow.kind: f"{int(flow.total_sent):,}" for flow in traffic.flows}
    table = [[*row, sent[row[0]]] for row in rows]
    buffer = next(record.bytes for record in runs[0].calls if record.kind == "reduce_scatter")
    return prose.step(
        "zero1.traffic", [prose.table("zero1.traffic", table)], buffer=buffer, both=2 * buffer
    )


def _totals(runs: Sequence[RankStep]) -> list[int]:
    # Owned elements, by rank.
    return [sum(p.place.stop - p.place.start for p in run.parts.values()) for run in runs]


def _owner_marks(runs: Sequence[RankStep]) -> MarkOf:
    """Return marks for rank 0's and rank 1's elements."""
    # Shards are contiguous, so rank 0's total is the boundary in the flat buffer.
    first, _ = accumulate(_totals(runs))
    return lambda index: "own" if index < first else "sent"


def _targets(run: RankStep) -> Tensor:
    assert run.batch.targets is not None
    return run.batch.targets[0]  # (tokens,)
