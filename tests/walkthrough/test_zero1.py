"""The walkthrough of ZeRO-1, with every number recomputed by numpy."""

import re

import numpy as np
import pytest

from tests.walkthrough import by_numpy
from tests.walkthrough.by_numpy import SHAPES, WIDTH, bf16, exactly, fp32
from zero_sim.report.walks import Cell
from zero_sim.walkthrough import walk_zero1
from zero_sim.workloads import build_workload
from zero_sim.workloads.transformer import GIVEN, INPUT, W_Q_AFTER_ADAM, W_Q_GRADS

BOUNDARY = 130
W_Q_AT = 8
_NUMBER = re.compile(r"(?<![\w.])-?\d(?:[\d,]*\d)?(?:\.\d+)?(?:e-\d+)?")


@pytest.fixture(scope="module")
def walk():
    return walk_zero1()


def words(table):
    return [[cell if isinstance(cell, str) else cell.text for cell in row] for row in table.rows]


def step_of(walk, title):
    (found,) = [step for step in walk.steps if step.title.startswith(title)]
    return found


def text(value, digits=4):
    return f"{float(value):.{digits}g}"


def matrix(values, row="token", form=text):
    return [[f"{row} {index}", *map(form, each)] for index, each in enumerate(values)]


def side_by_side(values):
    return matrix(np.concatenate(list(values), axis=1))


def flat(values, digits=4):
    names = [name for name, shape in SHAPES.items() for _ in range(int(np.prod(shape)))]
    return [
        [
            f"[{at}, {at + 10})",
            ", ".join(shortened(list(dict.fromkeys(names[at : at + 10])))),
            *(text(value, digits) for value in values[at : at + 10]),
        ]
        for at in range(0, len(values), 10)
    ]


def shortened(names):
    return names if len(names) < 3 else [names[0], "...", names[-1]]


def by_param(by_name):
    rows = []
    for name, values in by_name.items():
        named = [(name, values)]
        if values.ndim == 2:
            named = [(f"{name}[{index}]", row) for index, row in enumerate(values)]
        rows += [[label, *map(text, row), *[""] * (16 - len(row))] for label, row in named]
    return rows


def split(values):
    """Return params by name, from the flat buffer."""
    stops = np.cumsum([int(np.prod(shape)) for shape in SHAPES.values()])
    parts = np.split(values, stops[:-1])
    return {n: part.reshape(SHAPES[n]) for n, part in zip(SHAPES, parts, strict=True)}


class Pass:
    """The walkthrough recomputed by numpy from the page's given and drawn values."""

    def __init__(self, walk):
        step = step_of(walk, "Given and drawn")
        params, *inputs = ([row[1:] for row in words(table)] for table in step.tables)
        self.before = bf16([float(cell) for row in params for cell in row if cell])
        self.inputs = [bf16([[float(cell) for cell in row] for row in each]) for each in inputs]
        lists = re.findall(r"\[(.*?)\]", step.text[1])
        self.targets = [[int(token) for token in each.split(",")] for each in lists]
        self.ranks = [
            by_numpy.Rank(inputs=inputs, targets=targets, params=split(self.before))
            .forward()
            .backward()
            for inputs, targets in zip(self.inputs, self.targets, strict=True)
        ]
        self.grads = [by_numpy.flat(rank.grads) for rank in self.ranks]
        self.total = bf16(self.grads[0] + self.grads[1])
        self.m, self.v, self.master = by_numpy.adam(self.before, self.total / np.float32(2))
        self.after = bf16(self.master)


class Document:
    """The document's figures by numpy: gradients given, in fp32 or from bf16 params."""

    def __init__(self, stored):
        self.params = {name: stored(GIVEN[name]) for name in GIVEN}
        norm = {"ln1_weight": np.ones(WIDTH), "ln1_bias": np.zeros(WIDTH)}
        rank = by_numpy.Rank(
            inputs=stored(INPUT), targets=[], params={**self.params, **norm}, stored=stored
        )
        self.normal = rank.norm(rank.inputs, "ln1")
        self.query = self.normal @ self.params["W_q"]
        total = stored(stored(W_Q_GRADS[0]) + stored(W_Q_GRADS[1]))
        self.mean = total / np.float32(2)
        self.m, self.v, self.master = by_numpy.adam(self.params["W_q"], self.mean)


@pytest.fixture(scope="module")
def first(walk):
    return Pass(walk)


def test_drawn_values_equal_those_of_the_workload(first):
    """Only these values are taken from the page; they follow from the seed that it names."""
    from zero_sim.walkthrough.tiny_step import scenario_of

    workload = build_workload(scenario_of("bf16"))
    for rank in range(2):
        batch = workload.batch(step=0, rank=rank, micro=0)
        assert batch.targets.tolist() == [first.targets[rank]]
        assert batch.inputs[0].tolist() == first.inputs[rank].tolist()
    for name, values in split(first.before).items():
        assert workload.build().get_parameter(name).tolist() == values.tolist()


def test_given_values_equal_those_of_the_document(first):
    params = split(first.before)
    for name, values in GIVEN.items():
        assert np.array_equal(params[name], bf16(values))
    assert np.array_equal(first.inputs[0], bf16(INPUT))


def activations(first, *names):
    return [
        (side_by_side if rank.activations[name].ndim == 3 else matrix)(rank.activations[name])
        for rank in first.ranks
        for name in names
    ]


def owners():
    rows, offset = [], 0
    for name, shape in SHAPES.items():
        stop = offset + int(np.prod(shape))
        spans = [(offset, min(stop, BOUNDARY)), (max(offset, BOUNDARY), stop)]
        rows.append([
            name, f"[{offset}, {stop})",
            *(f"{b - a}: [{a}, {b})" if a < b else "" for a, b in spans),
        ])  # fmt: skip
        offset = stop
    return [[*rows, ["all", "[0, 260)", "130", "130"]]]


def losses(first):
    return [
        [
            [f"token {token}", *map(text, row), text(loss)]
            for token, (row, loss) in enumerate(zip(rank.probabilities, rank.losses, strict=True))
        ]
        for rank in first.ranks
    ]


def one_element(first):
    at = W_Q_AT
    gradient = float(first.total[at] / 2)
    m, v = float(first.m[at]), float(first.v[at])
    m_hat, v_hat = m / (1 - 0.9), v / (1 - 0.999)
    step = 1e-3 * m_hat / (v_hat**0.5 + 1e-8)
    return [[
        ["gradient of rank 0", text(first.grads[0][at]), "bf16"],
        ["gradient of rank 1", text(first.grads[1][at]), "bf16"],
        ["sum", text(first.total[at]), "of both, in bf16"],
        ["g", text(gradient, 6), "sum / 2, in fp32"],
        ["m", text(m, 6), "0.1 g"],
        ["v", text(v, 6), "0.001 g^2"],
        ["m_hat", text(m_hat, 6), "m / (1 - 0.9)"],
        ["v_hat", text(v_hat, 6), "v / (1 - 0.999)"],
        ["step", text(step, 6), "lr m_hat / (v_hat^0.5 + eps)"],
        ["master before", text(first.before[at], 8), "0.12 in bf16"],
        ["master after", text(first.master[at], 8), "before - step"],
        ["working param", text(first.after[at], 8), "that in bf16"],
    ]]  # fmt: skip


def halves(first):
    own = np.arange(260) < BOUNDARY
    return [
        flat(np.where(own == is_first, first.after, first.before)) for is_first in (True, False)
    ]


def held():
    sharded = ("masters", "exp_avg", "exp_avg_sq")
    whole = {"params": 260 * 2, "gradients": 260 * 2, **dict.fromkeys(sharded, 260 * 4)}
    shared = {name: size // 2 if name in sharded else size for name, size in whole.items()}
    rows = [[name, f"{whole[name]:,}", f"{shared[name]:,}"] for name in whole]
    return [[*rows, ["all", f"{sum(whole.values()):,}", f"{sum(shared.values()):,}"]]]


def after_to_three():
    return [
        matrix(Document(stored).master, row="row", form=lambda value: f"{value:.3f}")
        for stored in (exactly, bf16)
    ]


def slips():
    document, row = Document(exactly), fp32(INPUT[0])
    slipped = (row - row.mean()) / np.float32(0.398)

    def listed(values):
        return f"[{', '.join(f'{value:.4f}' for value in values)}]"

    return [[
        ["standard deviation of row 0", "0.398", f"{row.std():.4f}"],
        ["row 0, normalised", listed(slipped), listed(document.normal[0])],
        ["query of row 0", listed(slipped @ document.params["W_q"]), listed(document.query[0])],
        ["elements of W_1 by rank", "32 + 32", f"{BOUNDARY - 80} + {144 - BOUNDARY}"],
        ["elements by rank", "112 + 148", "130 + 130"],
    ]]  # fmt: skip


def document_element():
    given = Document(exactly)
    m, v = given.m[0, 0], given.v[0, 0]
    values = {
        "m": m, "v": v, "m_hat": m / np.float32(0.1), "v_hat": v / np.float32(0.001),
        "before": GIVEN["W_q"][0][0], "after": given.master[0, 0],
    }  # fmt: skip
    return [[[name, text(value)] for name, value in values.items()]]


def document_forward():
    given = Document(exactly)
    rows = {
        "input": INPUT[0],
        "normalised": given.normal[0],
        "query: normalised @ W_q": given.query[0],
    }
    return [[[name, *map(text, row)] for name, row in rows.items()]]


TABLES = {
    "Who owns what": lambda first: owners(),
    "Given and drawn": lambda first: [
        by_param(split(first.before)), *(matrix(each) for each in first.inputs)
    ],
    "Forward: layer norm": lambda first: activations(first, "norm 1"),
    "Forward: queries": lambda first: activations(first, "Q", "K", "V"),
    "Forward: two heads": lambda first: [
        side_by_side(by_numpy.by_heads(rank.activations[name]))
        for rank in first.ranks for name in "QKV"
    ],
    "Forward: scores": lambda first: activations(first, "scores"),
    "Forward: softmax": lambda first: activations(first, "softmax"),
    "Forward: mix": lambda first: activations(first, "mix"),
    "Forward: W_o": lambda first: activations(first, "W_o", "residual 1"),
    "Forward: second": lambda first: activations(first, "norm 2"),
    "Forward: FFN": lambda first: activations(first, "inner", "relu", "FFN", "residual 2"),
    "Forward: logits": lambda first: activations(first, "logits"),
    "Forward: probabilities": losses,
    "Backward": lambda first: [by_param(split(each)) for each in first.grads],
    "The flat gradient buffer": lambda first: [flat(each) for each in first.grads],
    "Reduce-scatter": lambda first: [flat(first.total)],
    "Adam on one": one_element,
    "Adam on every": lambda first: [flat(first.m), flat(first.v), flat(first.master, 5)],
    "Half new": halves,
    "All-gather": lambda first: [flat(first.after)],
    "Memory saved": lambda first: held(),
    "Bytes moved": lambda first: [[
        ["reduce_scatter", "260 bfloat16", "520", "260"],
        ["all_reduce", "3 float64", "24", "24"],
        ["all_gather", "130 bfloat16", "260", "260"],
    ]],
    "With the document's figures: forward": lambda first: document_forward(),
    "With the document's figures: gradients": lambda first: [
        *(matrix(each, row="row") for each in W_Q_GRADS),
        matrix(Document(exactly).mean, row="row"),
    ],
    "With the document's figures: Adam": lambda first: document_element(),
    "With the document's figures: W_q": lambda first: after_to_three(),
    "With the document's figures: its slips": lambda first: slips(),
}  # fmt: skip
"""Rows of all tables of a step, by the start of its title."""


@pytest.mark.parametrize("title", TABLES)
def test_tables_equal_those_by_numpy(walk, first, title):
    assert [words(table) for table in step_of(walk, title).tables] == TABLES[title](first)


def test_every_step_is_recomputed(walk):
    assert [step_of(walk, title).title for title in TABLES] == [step.title for step in walk.steps]


def mean_losses(first):
    losses = [text(rank.losses.mean(), 6) for rank in first.ranks]
    return [losses[0], "0", losses[1], "1"]


def document_after(first):
    master = Document(bf16).master[2, 0]
    begin = text(bf16(GIVEN["W_q"][2][0]), 8)
    return ["2", "0", begin, text(master, 8), f"{master:.3f}", f"{W_Q_AFTER_ADAM[2][0]:.3f}"]


TEXTS = {
    "Who owns what": lambda first: [
        "260", "130", "50", "0", "1", "14", "0", "129", "49", "0", "1", "130"
    ],
    "Given and drawn": lambda first: [
        "0", "1", "0", "1", "0", "0.12", text(bf16(0.12), 8),
        *map(str, first.targets[0]), "0", *map(str, first.targets[1]), "1",
    ],
    "Forward: probabilities": mean_losses,
    "The flat gradient buffer": lambda first: ["260", "130", "50", "0", "14", "1"],
    "Reduce-scatter": lambda first: ["0", "130", "1", "130"],
    "Adam on every": lambda first: ["0", "130", "1", "130"],
    "All-gather": lambda first: [str(int((first.after != first.before).sum())), "260"],
    "Memory saved": lambda first: ["2,600", "37.5", "4,160", "12", "16"],
    "Bytes moved": lambda first: ["0", "520", "520", "1,040"],
    "With the document's figures: forward": lambda first: [
        "0", "0", f"{fp32(INPUT[0]).mean():.3f}", f"{fp32(INPUT[0]).std():.4f}"
    ],
    "With the document's figures: W_q": document_after,
    "With the document's figures: its slips": lambda first: ["0", "64"],
}  # fmt: skip
"""All numbers in the text of a step, in order."""


@pytest.mark.parametrize("title", TEXTS)
def test_numbers_in_texts_equal_those_by_numpy(walk, first, title):
    assert _NUMBER.findall(" ".join(step_of(walk, title).text)) == TEXTS[title](first)


def test_half_of_the_params_are_outdated_before_the_gather(walk):
    marks = [
        [cell.mark for row in table.rows for cell in row if isinstance(cell, Cell)]
        for table in step_of(walk, "Half new").tables
    ]
    old = [[mark == "sent" for mark in each] for each in marks]
    assert old == [[at >= BOUNDARY for at in range(260)], [at < BOUNDARY for at in range(260)]]


def test_values_of_the_document_need_fp32_masters(walk):
    """From bf16 params, W_q[2, 0] differs and is marked."""
    marks = [
        [[cell.mark for cell in row[1:]] for row in table.rows]
        for table in step_of(walk, "With the document's figures: W_q").tables
    ]
    assert marks[0] == [["new"] * 4] * 4
    assert marks[1][2][0] == "wrong"
