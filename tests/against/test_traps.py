"""Scripts that a comparison in another precision easily misjudges."""

import pytest
from click.testing import CliRunner

from zero_sim.cli.main import main

STEP = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    loss_of(model, rows(step)).backward()
    {between}
    optimizer.step()
"""
RIGHT = STEP.format(between="average()")


def outcome(comparison):
    return comparison.verdict.outcome


def test_correct_script_is_equal(judged):
    assert outcome(judged("train.py", code=RIGHT)) == "equal"


def test_unreduced_gradients_are_different(judged):
    assert outcome(judged("train.py", code=STEP.format(between="pass"))) == "different"


def test_reducing_a_copy_of_a_gradient_does_not_change_it(judged):
    between = "average(); dist.all_reduce(next(model.parameters()).grad.float())"
    code = "model.bfloat16()\nplain = rows\nrows = lambda step: plain(step).bfloat16()\n"
    assert outcome(judged("train.py", code=code + STEP.format(between=between))) == "equal"


def test_reducing_a_no_op_cast_reduces_the_gradient(judged):
    between = "[dist.all_reduce(p.grad.float()) for p in model.parameters()]"
    between += "; [p.grad.div_(ranks) for p in model.parameters()]"
    assert outcome(judged("train.py", code=STEP.format(between=between))) == "equal"


MASTERS = """
model.bfloat16()
working = list(model.parameters())
masters = [p.detach().float() for p in working]
optimizer = torch.optim.SGD(masters, lr=0.1)
for step in range(3):
    loss_of(model, rows(step).bfloat16()).backward()
    average()
    for p, master in zip(working, masters):
        master.grad, p.grad = p.grad.float(), None
    optimizer.step()
    if {copies}:
        for p, master in zip(working, masters):
            p.data.copy_(master)
"""


@pytest.mark.parametrize(("copies", "expected"), [("True", "equal"), ("rank == 0", "different")])
def test_master_is_a_copy_of_its_param(judged, copies, expected):
    assert outcome(judged("train.py", code=MASTERS.format(copies=copies))) == expected


BUFFER = """
buffer = torch.FloatTensor(sum(p.numel() for p in model.parameters()))
def average():
    grads = [p.grad for p in model.parameters()]
    torch.cat([grad.flatten() for grad in grads], out=buffer)
    dist.all_reduce(buffer)
    start = 0
    for grad in grads:
        grad.copy_(buffer[start:start + grad.numel()].view_as(grad) / ranks)
        start += grad.numel()
"""


def test_float_buffer_by_its_old_constructor_keeps_all_digits(judged):
    comparison = judged("train.py", code=BUFFER + RIGHT)
    assert outcome(comparison) == "equal"
    assert comparison.verdict.largest_multiple < 100


COUNTED = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    mine = rows(step)
    count = torch.tensor(float(len(mine)))
    dist.all_reduce(count)
    for _ in range(int(count * 2 / 2) // 4):
        (loss_of(model, mine) / 2).backward()
    {average}
    optimizer.step()
"""


@pytest.mark.parametrize(("average", "expected"), [("average()", "equal"), ("pass", "different")])
def test_integer_counts_in_floats_are_exact_under_rounding_noise(judged, average, expected):
    assert outcome(judged("train.py", code=COUNTED.format(average=average))) == expected


def test_runs_do_not_change_the_working_folder(judged, tmp_path):
    code = (
        RIGHT + "assert not os.path.exists('left.pt')\ntorch.save(model.state_dict(), 'left.pt')\n"
    )
    assert outcome(judged("train.py", code="dist.barrier()\n" + code, ranks=1)) == "equal"
    assert not (tmp_path / "left.pt").exists()


def test_earlier_checkpoint_is_available_to_each_run(judged, tmp_path):
    (tmp_path / "count.txt").write_text("2")
    code = "from pathlib import Path\ncount = Path('count.txt')\n"
    code += "steps = int(count.read_text())\ncount.write_text('0')\n"
    comparison = judged("train.py", code=code + RIGHT.replace("range(3)", "range(steps)"), ranks=1)
    assert comparison.verdict.steps == 2


def test_nothing_observed_is_inconclusive(judged):
    verdict = judged("train.py", code="").verdict
    assert verdict.outcome == "inconclusive"
    assert "Nothing was observed" in verdict.reason


def test_noise_that_changes_a_branch_is_inconclusive(judged):
    draw = "if int(loss_of(model, rows(0)).item() * 3e15) % 2: optimizer.step()\n"
    verdict = judged("train.py", code=RIGHT + draw * 20).verdict
    assert verdict.outcome == "inconclusive"
    assert "rounding decides" in verdict.reason


def test_failing_script_is_distinguished_from_failing_float64(judged):
    assert outcome(judged("train.py", code="raise ValueError('no data')")) == "script-fails"
    verdict = judged("train.py", code="torch.zeros(2).view(torch.int32)").verdict
    assert verdict.outcome == "unsupported"
    assert "Tensor.view(torch.int32)" in verdict.reason


def test_deadlock_on_several_ranks_only_is_different(judged):
    code = RIGHT + "if ranks > 1 and rank == 0:\n    dist.barrier()\n"
    verdict = judged("train.py", code=code).verdict
    assert verdict.outcome == "different"
    assert "the run on 1 rank does not" in verdict.reason


def test_other_rows_are_inconclusive(judged):
    code = RIGHT.replace("rows(step)", "rows(step + rank)")
    verdict = judged("train.py", code=code).verdict
    assert verdict.outcome == "inconclusive"
    assert "in step 1" in verdict.reason


def test_fed_rows_are_those_of_one_rank(judged):
    code = RIGHT.replace("rows(step)", "rows(step + 10 * rank)").replace("sin()", "cos()")
    fed = judged("train.py", code=code, feeds=True)
    assert outcome(fed) == "different"  # The targets are computed from the rows of each rank.
    code = code.replace("loss_of(model,", "own_loss(model,")
    own = "def own_loss(model, mine):\n    return model(mine).square().mean()\n"
    assert outcome(judged("train.py", code=own + code, feeds=True)) == "equal"


OWN = """
average_of = [torch.zeros_like(p) for p in model.parameters()]
for step in range(3):
    model.zero_grad()
    loss_of(model, rows(step)).backward()
    average()
    with torch.no_grad():
        for p, kept in zip(model.parameters(), average_of):
            kept.lerp_(p.grad, 0.1)
            p -= (0.1 + 1e-7 * {fault}) * kept
"""


def test_steps_of_a_custom_optimizer_are_detected(judged):
    right = judged("train.py", code=OWN.format(fault="0")).verdict
    assert (right.outcome, right.steps) == ("equal", 3)
    wrong = judged("train.py", code=OWN.format(fault="(step == 1) * (ranks - 1)")).verdict
    assert wrong.outcome == "different"
    assert wrong.differences[0].point.step == 2


def test_state_made_by_torch_before_a_load_is_no_step(judged):
    code = "from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict\n" + RIGHT
    asked = code.replace("for step", "get_optimizer_state_dict(model, optimizer)\nfor step", 1)
    verdict = judged("train.py", code=asked).verdict
    assert (verdict.outcome, verdict.steps) == ("equal", 3)


def test_rows_read_by_several_ranks_are_different(judged):
    code = RIGHT.replace("rows(step)", "torch.cat([torch.ones(1, 4) * step, rows(step)[1:]])")
    assert outcome(judged("train.py", code=code)) == "different"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("torch.nn.init.normal_(model[0].weight, generator=other)", "inconclusive"),
        ("model[0].weight.data.mul_(1 + 1e-6)", "different"),
    ],
)
def test_different_start_on_several_ranks_is_judged_by_its_cause(judged, change, expected):
    begin = f"other = torch.Generator().manual_seed(ranks)\nif ranks > 1: {change}\n"
    verdict = judged("train.py", code=begin + RIGHT).verdict
    assert verdict.outcome == expected
    assert ("--start-of-one" in verdict.remedy) is (expected == "inconclusive")


def test_options_after_the_script_are_refused(monkeypatch, tmp_path):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["torchrun", "train.py", "--against", "1"])
    assert done.exit_code == 2
    assert "Move it before the script" in done.output
