"""Integers summed in a float format, a fault hidden by a comparison in float64."""

import pytest

COUNTS = """
class Router(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(4, 2)
        self.register_buffer("counts", torch.zeros(4, dtype={dtype}))
    def forward(self, mine):
        choice = mine.argmax(1)
        with torch.no_grad():
            self.counts += torch.bincount(choice, minlength=4).to(self.counts.dtype)
        return self.out(mine)
model = Router().to(torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    mine = rows(step, {rows}).bfloat16()
    for micro in mine.split(7):
        model(micro).square().mean().backward()
    average()
    dist.all_reduce(model.counts)
    model.counts.zero_()
    optimizer.step()
    optimizer.zero_grad()
"""


def noted(judged, dtype, rows):
    verdict = judged("train.py", code=COUNTS.format(dtype=dtype, rows=rows)).verdict
    return [note for note in verdict.notes if "integers" in note]


def test_counts_in_bfloat16_are_named(judged):
    (note,) = noted(judged, "torch.float32", 2800)
    assert "bfloat16 has all integers up to 256" in note
    assert "add_ at train.py" in note
    assert "all_reduce at train.py" in note
    assert note.count("add_ at") == 1


@pytest.mark.parametrize(("dtype", "rows"), [("torch.int64", 2800), ("torch.float32", 280)])
def test_exact_counts_are_not_named(judged, dtype, rows):
    assert not noted(judged, dtype, rows)


def test_counts_in_float32_are_exact_up_to_its_limit(judged):
    code = COUNTS.replace(".to(torch.bfloat16)", "").replace(".bfloat16()", "")
    verdict = judged("train.py", code=code.format(dtype="torch.float32", rows=2800)).verdict
    assert not verdict.notes


def test_sum_of_integers_beyond_float32_is_named(judged):
    code = COUNTS.replace("torch.bincount", "2**24 + torch.bincount")
    code = code.replace(".to(torch.bfloat16)", "").replace(".bfloat16()", "")
    (note,) = judged("train.py", code=code.format(dtype="torch.float32", rows=56)).verdict.notes
    assert "float32 has all integers up to 16,777,216" in note
