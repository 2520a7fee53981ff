"""Scripts with dropout: equal masks on all ranks, and refused models."""

import pytest

LOOP = """
torch.manual_seed(rank)  # Each rank draws masks of its own.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(3):
    optimizer.zero_grad()
    mine = rows(step, 24)
    micros = mine.chunk(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    for micro in micros:
        (loss_of(model, micro) / len(micros)).backward()
    average()
    optimizer.step()
"""
DROPOUT = "model.insert(1, torch.nn.Dropout(0.4))\n"
ATTENTION = """
model.insert(0, torch.nn.Linear(4, 24))
class Attention(torch.nn.Module):
    def forward(self, x):
        q = x.view(-1, 3, 2, 4).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.4, is_causal=True)
        y = y.transpose(1, 2).reshape(-1, 24)
        return torch.nn.functional.dropout(y, 0.2, self.training).view(-1, 6, 4).sum(1)
model.insert(1, Attention())
"""
ENCODER = """
model = torch.nn.Sequential(
    torch.nn.Linear(4, 24), torch.nn.Unflatten(1, (3, 8)),
    torch.nn.TransformerEncoderLayer(8, 2, 12, dropout=0.3, batch_first=True),
    torch.nn.Flatten(), torch.nn.Linear(24, 2),
)
"""
CHANNELS = """
model = torch.nn.Sequential(
    torch.nn.Linear(4, 24), torch.nn.Unflatten(1, (6, 2, 2)), torch.nn.Dropout2d(0.3, True),
    torch.nn.Conv2d(6, 2, 2), torch.nn.Flatten(),
)
"""
DEPTH = """
class Depth(torch.nn.Module):
    def forward(self, x):
        return x + x.sin() * x.new_empty(x.shape[0], 1).bernoulli_(0.5)
model.insert(1, Depth())
"""
RECOMPUTED = """
from torch.utils.checkpoint import checkpoint
class Recomputed(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant={reentrant})
model = torch.nn.Sequential(
    model[0], Recomputed(torch.nn.Sequential(torch.nn.Dropout(0.4), torch.nn.Tanh())), model[2]
)
"""
MODELS = {
    "module": DROPOUT,
    "attention": ATTENTION,
    "encoder": ENCODER,
    "channels": CHANNELS,
    "stochastic depth": DEPTH,
    "recomputed": RECOMPUTED.format(reentrant=False),
    "recomputed, reentrant": RECOMPUTED.format(reentrant=True),
}


@pytest.mark.parametrize("model", MODELS)
def test_correct_script_with_dropout_is_equal(judged, model):
    assert judged("train.py", code=MODELS[model] + LOOP).verdict.outcome == "equal"


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_masks_equal_those_of_one_rank_on_any_number_of_ranks(judged, ranks):
    verdict = judged("train.py", "2", ranks=ranks, one=(), code=ENCODER + LOOP).verdict
    assert verdict.outcome == "equal"


def test_dropout_drops(judged):
    comparison = judged("train.py", code=DROPOUT + LOOP)
    baseline = comparison.prepared.baseline
    grads = [baseline.expected(p) for p in baseline.pieces if p[1:] == ("gradient", "0.bias")]
    assert any((grad == 0).any() for grad in grads)
    assert not any((grad == 0).all() for grad in grads)


@pytest.mark.parametrize(
    "wrong",
    [
        ("loss_of(model, micro)", "(loss_of(model, micro) * (1 + rank))"),
        ("    average()\n", ""),
        ("/ len(micros)", "/ 1"),
    ],
)
def test_planted_fault_with_dropout_is_different(judged, wrong):
    code = (ENCODER + LOOP).replace(*wrong)
    assert judged("train.py", "3", one=(), code=code).verdict.outcome == "different"


OWN = """
class Own(torch.nn.Module):
    def forward(self, x):
        return {result}
model.insert(1, Own())
"""


def test_dropout_of_features_shared_by_ranks_is_refused_by_name(judged):
    half = "torch.nn.functional.dropout(x.chunk(ranks, 1)[rank], 0.4).repeat(1, ranks)"
    verdict = judged("train.py", code=OWN.format(result=half) + LOOP).verdict
    assert verdict.outcome == "unsupported"
    assert "dropout in 1" in verdict.reason


def test_dropout_of_rows_in_the_last_dimension_is_refused_by_name(judged):
    turned = OWN.format(result="torch.nn.functional.dropout(x.T, 0.4).T")
    verdict = judged("train.py", "2", one=("2",), ranks=1, code=turned + LOOP).verdict
    assert verdict.outcome == "unsupported"
    assert "over rows" in verdict.reason


@pytest.mark.parametrize(
    "module",
    ["Sequential(torch.nn.AlphaDropout(0.1))", "BatchNorm1d(6)", "GRU(6, 6, 2, dropout=0.1)"],
)
def test_modules_with_other_random_or_batch_effects_are_refused_by_name(judged, module):
    own = OWN.format(result="self.own(x)[0] if type(self.own) is torch.nn.GRU else self.own(x)")
    code = f"{own}model[1].own = torch.nn.{module}\n{LOOP}"
    verdict = judged("train.py", code=code).verdict
    assert verdict.outcome == "unsupported"
    assert "1.own" in verdict.reason
