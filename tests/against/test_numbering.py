"""Modules with other numbers on each rank."""

import pytest

from zero_sim.against.numbering import other_prefixes

TABLES = """
class Tables(torch.nn.Module):
    def __init__(self):
        super().__init__()
        tables = [torch.nn.Linear(4, 2) for _ in range(8)]
        for each in tables: torch.nn.init.zeros_(each.bias)
        self.tables = torch.nn.ModuleList(tables[rank * 8 // ranks : (rank + 1) * 8 // ranks])
    def forward(self, x):
        own = sum(table(x).sin() for table in self.tables)
        all_ = own.detach().clone()
        dist.all_reduce(all_)
        return own + (all_ - own.detach())
model = Tables()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for step in range(3):
    mine = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    loss_of(model, mine).backward()
    optimizer.step()
if rank == ranks - 1: torch.save(model.state_dict(), "last.pt")
"""
WRONG = "    if rank: model.tables[0].bias.grad *= 1.5\n    optimizer.step()"


@pytest.mark.parametrize("ranks", [2, 4])
def test_renumbered_modules_are_compared(judged, ranks):
    comparison = judged("train.py", code=TABLES, ranks=ranks, all_read_all=True)
    assert comparison.verdict.outcome == "equal"
    names = {point.name for point in comparison.measurement.measured}
    assert names >= {f"tables.{index}.bias" for index in range(8)}


def test_fault_of_a_renumbered_module_has_its_name_on_one_rank(judged):
    code = TABLES.replace("    optimizer.step()", WRONG)
    verdict = judged("train.py", code=code, all_read_all=True).verdict
    assert verdict.outcome == "different"
    assert verdict.differences[0].point.name == "tables.4.bias"


def test_teacher_with_the_params_of_its_student_keeps_its_name(judged):
    code = """
teacher = torch.nn.Sequential(*[torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)])
teacher.load_state_dict(model.state_dict())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    optimizer.zero_grad()
    with torch.no_grad():
        target = teacher(rows(step))
    (loss_of(model, rows(step)) - target.mean()).backward()
    average()
    optimizer.step()
    for p, q in zip(model.parameters(), teacher.parameters()):
        q.data.lerp_(p.data, 0.1)
"""
    assert judged("train.py", code=code).verdict.outcome == "equal"


KNOWN = {"a.0.w": "x", "a.0.b": "0", "a.1.w": "y", "a.1.b": "0"}


def test_prefixes_are_changed_only_if_unambiguous():
    assert other_prefixes({"a.0.w": "y", "a.0.b": "0"}, KNOWN) == {"a.0": "a.1"}
    assert other_prefixes(KNOWN, KNOWN) == {}
    assert other_prefixes({"a.0.w": "z", "a.0.b": "0"}, KNOWN) == {}
    assert other_prefixes({"a.0.w": "y", "a.1.b": "0"}, KNOWN) == {"a.0": "a.1"}
    assert other_prefixes({"a.0.w": "y", "a.1.w": "z"}, KNOWN) == {}
    assert other_prefixes({"a.0.w": "y"}, {"a.0.w": "y", "a.1.w": "y"}) == {}
    assert other_prefixes({"p": "x"}, {"q": "x"}) == {}
