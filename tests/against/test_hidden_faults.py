"""Faults hidden by training in one process, each after a public report."""

import pytest

from zero_sim.against.account import account_of
from zero_sim.against.text import render

# Averages of weights, updated after every micro-batch instead of every step.
AVERAGED = """
import contextlib, copy
from torch.nn.parallel import DistributedDataParallel
follower = copy.deepcopy(model).requires_grad_(False)
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
@torch.no_grad()
def follow():
    for old, new in zip(follower.parameters(), model.parameters()):
        old.lerp_(new, 0.1)
for step in range(3):
    micros = rows(step, 16).split(4)
    for micro in micros:
        with contextlib.nullcontext() if micro is micros[-1] else wrapped.no_sync():
            (loss_of(wrapped, micro) / len(micros)).backward()
        if {each_micro}:
            follow()
    optimizer.step()
    optimizer.zero_grad()
    if not {each_micro}:
        follow()
with torch.no_grad():
    follower(torch.ones(1, 4))
"""


def test_weight_average_updated_per_micro_batch_is_different(judged):
    verdict = judged("train.py", code=AVERAGED.format(each_micro=True)).verdict
    assert verdict.outcome == "different"
    assert "a forward without gradients used it: module 2" in verdict.differences[0].point.text
    assert judged("train.py", code=AVERAGED.format(each_micro=False)).verdict.outcome == "equal"


# The loss is a rank's mean times the ranks, not divided by the micro-batches.
UNDIVIDED = """
count = int(sys.argv[1]) // ranks
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(3):
    for micro in rows(step, 16).chunk(count):
        ({loss}).backward()
    average()
    optimizer.step()
    optimizer.zero_grad()
"""
HIDDEN = UNDIVIDED.format(loss="loss_of(model, micro) * ranks")
DIVIDED = UNDIVIDED.format(loss="loss_of(model, micro) / count")


@pytest.mark.parametrize(("code", "expected"), [(HIDDEN, "different"), (DIVIDED, "equal")])
def test_missing_division_is_found_with_other_micro_batches(judged, code, expected):
    assert judged("train.py", "4", code=code).verdict.outcome == "equal"
    comparison = judged("train.py", "4", code=code, ranks=1, one=("2",))
    assert comparison.verdict.outcome == expected
    text = render(comparison.verdict, account_of(comparison))
    assert ("  the only rank: " in text) is (expected == "different")
