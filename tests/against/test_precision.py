"""Precision faults hidden by float64: a warning in the script's own dtypes, and undeclared
dtypes.
"""

import pytest

from zero_sim.against.precision import measure_precision

STEPS = """
{setup}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(4):
    optimizer.zero_grad()
    loss_of(model, rows(step)).backward()
    {reduces}
    optimizer.step()
"""
NARROW = "[p.grad.copy_(mean_of(p.grad.bfloat16())) for p in model.parameters()]"
MEAN = """
def mean_of(grad):
    dist.all_reduce(grad)
    return grad / ranks
"""


@pytest.fixture
def measured(judged):
    """Judge a script in float64, in which it is equal, and then in its own dtypes."""

    def run(setup, reduces):
        comparison = judged("train.py", code=STEPS.format(setup=setup, reduces=reduces))
        assert comparison.verdict.outcome == "equal"
        return measure_precision(comparison.prepared.side, comparison.side, seed=0)

    return run


@pytest.mark.parametrize(
    "setup", ["", "model.bfloat16()\nplain = rows\nrows = lambda step: plain(step).bfloat16()"]
)
def test_correct_script_causes_no_warning(measured, setup):
    report = measured(setup, "average()")
    assert report.compared_count > 10
    assert not report.above
    assert not report.false_runs
    assert "of 6 runs with only rounding noise, 0 would cause a warning" in report.text


def test_bfloat16_reduction_on_several_ranks_is_a_warning(measured):
    report = measured(MEAN, f"{NARROW} if ranks > 1 else average()")
    assert report.above
    assert "warning of precision" in report.text
    assert "first at step 1, optimizer state after the step" in report.text
    assert "(float32, " in report.text


def test_starts_alike_prevents_a_warning_of_different_starts(judged):
    code = "for p in model.parameters(): p.data.mul_(ranks)\n"
    code = STEPS.format(setup=code, reduces="average()")
    comparison = judged("train.py", code=code, starts_alike=True)
    sides = comparison.prepared.side, comparison.side
    assert measure_precision(*sides, seed=0).above
    assert not measure_precision(*sides, seed=0, starts_alike=True).above


def test_failure_in_native_dtypes_is_reported(measured):
    vanishes = "1 / (torch.tensor(1e-9) + 1.0 - 1.0).mul(ranks - 1).item() if ranks > 1 else 0"
    report = measured("", f"average()\n    {vanishes}")
    assert report.trouble.startswith("2 ranks fail in their own dtypes: ")


def notes_of(judged, setup, reduces):
    return judged("train.py", code=STEPS.format(setup=setup, reduces=reduces)).verdict.notes


def test_reduction_in_another_dtype_than_params_is_noted(judged):
    (note,) = notes_of(judged, MEAN, NARROW)
    assert "gradients are reduced in bfloat16, but params and settings declare float32" in note
    assert "all_reduce at train.py" in note


WRAPPED = """
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.device_mesh import init_device_mesh
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16{reduce_dtype})
fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)), mp_policy=policy)
"""
HOOKED = """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(model)
model.register_comm_hook(None, default_hooks.fp16_compress_hook)
"""
DECLARED = {
    "the dtype of params": (
        "model.bfloat16()\nplain = rows\nrows = lambda *a: plain(*a).bfloat16()",
        "average()",
    ),
    "a loss for the log": ("", "average(); dist.all_reduce(torch.ones((), dtype=torch.bfloat16))"),
    "a compressing hook": (HOOKED, "pass"),
    "a policy": (WRAPPED.format(reduce_dtype=", reduce_dtype=torch.bfloat16"), "pass"),
    "a wide policy": (WRAPPED.format(reduce_dtype=", reduce_dtype=torch.float32"), "pass"),
}


@pytest.mark.parametrize("name", DECLARED)
def test_declared_reduce_dtype_is_not_noted(judged, name):
    assert not notes_of(judged, *DECLARED[name])


def test_policy_with_a_bfloat16_reduction_is_noted(judged):
    (note,) = notes_of(judged, WRAPPED.format(reduce_dtype=""), "pass")
    assert "gradients are reduced in bfloat16" in note
    assert "reduce_scatter at train.py" in note
