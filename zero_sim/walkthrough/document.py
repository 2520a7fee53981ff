"""Second pass through the ZeRO-1 step: the document's own figures, and its slips.

The document gives gradients for `W_q` without a loss. The system trains with these gradients twice:
in fp32, because the document computes in decimals, and in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_sim.report.walks import Cell, Mark, Step
from zero_sim.walkthrough import prose
from zero_sim.walkthrough.matrices import cells, columns, matrix, number
from zero_sim.walkthrough.tiny_step import (
    RANKS,
    RankStep,
    loss_of_given_grads,
    run_step,
    scenario_of,
)
from zero_sim.workloads.transformer import (
    GIVEN,
    INPUT,
    SHAPES,
    W_Q_AFTER_ADAM,
    W_Q_GRADS,
    WIDTH,
)

# The document's slips: a standard deviation, and the number of `W_1` elements on each rank.
_DEVIATION, _CUT = 0.398, (32, 32)


def document_steps(first_pass: Sequence[RankStep]) -> list[Step]:
    """Return the steps in the second pass.

    Args:
        first_pass: All ranks in the first pass, which has the same layout.
    """
    in_fp32 = run_step(scenario_of("fp32"), loss_of=loss_of_given_grads)
    in_bf16 = run_step(scenario_of("bf16"), loss_of=loss_of_given_grads)
    return [
        _forward(in_fp32[0]),
        _gradients(in_fp32),
        _one_element(in_fp32[0]),
        _after(in_fp32[0], in_bf16[0]),
        _slips(in_fp32[0], first_pass),
    ]


def _forward(run: RankStep) -> Step:
    row = torch.tensor(INPUT[0])
    rows = [
        ["input", *cells(row)],
        ["normalised", *cells(run.activations["norm 1"][0])],
        ["query: normalised @ W_q", *cells(run.activations["Q"][0], mark="new")],
    ]
    table = prose.table("document.forward", rows, head=columns(WIDTH))
    return prose.step("document.forward", [table], mean=row.mean().item(), deviation=_spread(row))


def _gradients(runs: Sequence[RankStep]) -> Step:
    given = [
        matrix(torch.tensor(grads), title=f"Given gradient of W_q on rank {rank}", row="row")
        for rank, grads in enumerate(W_Q_GRADS)
    ]
    # Rank 0 owns W_q. Its reduced gradient is a sum, not a mean.
    mean = (_of_w_q(runs[0].parts["W_q"].grad) / RANKS).view(WIDTH, WIDTH)
    return prose.step(
        "document.gradients",
        [*given, matrix(mean, title="Mean, on rank 0", row="row", mark="new")],
    )


def _one_element(run: RankStep) -> Step:
    # Element 0 of the part is W_q[0, 0]. At step 1, bias correction divides by 1 - beta.
    part, spec = run.parts["W_q"], scenario_of("fp32").optimizer
    m, v = part.state["exp_avg"][0].item(), part.state["exp_avg_sq"][0].item()
    rows = [
        ["m", number(m)],
        ["v", number(v)],
        ["m_hat", number(m / (1 - spec.betas[0]))],
        ["v_hat", number(v / (1 - spec.betas[1]))],
        ["before", number(GIVEN["W_q"][0][0])],
        ["after", number(part.master[0].item())],
    ]
    return prose.step("document.one_element", [prose.table("document.one_element", rows)])


def _after(in_fp32: RankStep, in_bf16: RankStep) -> Step:
    printed = torch.tensor(W_Q_AFTER_ADAM)
    exact, rounded = (run.parts["W_q"].master.view(WIDTH, WIDTH) for run in (in_fp32, in_bf16))
    # Only this element differs from the document to three decimals.
    place = (2, 0)
    return prose.step(
        "document.after",
        [
            prose.table(
                "document.after", _to_three(values, printed), head=columns(WIDTH), title=title
            )
            for values, title in (
                (exact, "Masters that start with the given values in fp32"),
                (rounded, "Masters that start with bf16 params"),
            )
        ],
        printed=f"{printed[place].item():.3f}",
        rounded=f"{rounded[place].item():.3f}",
        # The first norm's 8 elements come before W_q in the flat buffer.
        begin=number(in_bf16.before[8 + WIDTH * place[0] + place[1]].item(), digits=8),
        other=number(rounded[place].item(), digits=8),
    )


def _to_three(values: Tensor, printed: Tensor) -> list[list[Cell | str]]:
    """Return values to three decimals, marked if they equal the document's values or not."""
    rows: list[list[Cell | str]] = []
    for index, (got, wanted) in enumerate(zip(values.tolist(), printed.tolist(), strict=True)):
        row: list[Cell | str] = [f"row {index}"]
        for value, figure in zip(got, wanted, strict=True):
            # Compare as printed, because the document has three decimals.
            text = f"{value:.3f}"
            mark: Mark = "new" if text == f"{figure:.3f}" else "wrong"
            row.append(Cell(text, mark))
        rows.append(row)
    return rows


def _slips(run: RankStep, first_pass: Sequence[RankStep]) -> Step:
    # Repeat the document's computation with its slips, next to this run's values.
    row = torch.tensor(INPUT[0])
    slipped = (row - row.mean()) / _DEVIATION
    query = slipped @ torch.tensor(GIVEN["W_q"])
    # The document cuts W_1 in halves. Then rank 0 would own fewer elements than rank 1.
    totals = [sum(p.place.stop - p.place.start for p in each.parts.values()) for each in first_pass]
    cut = [each.parts["W_1"].place.stop - each.parts["W_1"].place.start for each in first_pass]
    reported = [total - own + half for total, own, half in zip(totals, cut, _CUT, strict=True)]
    rows = [
        ("standard deviation of row 0", f"{_DEVIATION}", f"{_spread(row):.4f}"),
        ("row 0, normalised", _list(slipped), _list(run.activations["norm 1"][0])),
        ("query of row 0", _list(query), _list(run.activations["Q"][0])),
        ("elements of W_1 by rank", _sum(_CUT), _sum(cut)),
        ("elements by rank", _sum(reported), _sum(totals)),
    ]
    table = [[name, Cell(wrong, "wrong"), Cell(right, "new")] for name, wrong, right in rows]
    elems = torch.Size(SHAPES["W_1"]).numel()
    return prose.step("document.slips", [prose.table("document.slips", table)], elems=elems)


def _spread(row: Tensor) -> float:
    # Layer norm divides by N, not by N - 1.
    return row.std(correction=0).item()


def _list(values: Tensor) -> str:
    return f"[{', '.join(f'{value:.4f}' for value in values.tolist())}]"


def _sum(counts: Sequence[int]) -> str:
    return " + ".join(map(str, counts))


def _of_w_q(values: Tensor | None) -> Tensor:
    assert values is not None
    return values.float()
