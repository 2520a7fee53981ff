"""A system's own size checks, distinguished from faults."""

import pytest

from zero_sim.findings.records import CaseResult, Finding
from zero_sim.run.refused_sizes import refused_size
from zero_sim.scenario.checks import Check

THEIRS = "/home/me/lib/optim.py"


def raised(error, statement, *, file=THEIRS):
    """Result of a case in which rank 0 raised."""
    trace = (
        f'Traceback (most recent call last):\n  File "{file}", line 88, in step\n    {statement}'
    )
    finding = Finding(
        check=Check.WORLD_RANK_FAILED, message=f"rank 0 raised {error}", detail=f"{trace}\n{error}"
    )
    return CaseResult(id="a", verdict="fail", seconds=0.0, findings=(finding,))


@pytest.mark.parametrize(
    ("error", "statement"),
    [
        ("AssertionError: ", "assert rows % ranks == 0"),
        ("AssertionError: 12 % 7", "assert rows % ranks == 0, f'{rows} % {ranks}'"),
        ("ValueError: 7 is not divisible by 2", "raise ValueError(text)"),
        ("NotImplementedError: multiples of 8 only", "raise NotImplementedError(text)"),
    ],
)
def test_size_check_is_recognized(error, statement):
    kind = error.partition(":")[0]
    assert refused_size(raised(error, statement)) == f"{kind} at optim.py:88: {statement}"


@pytest.mark.parametrize(
    ("error", "statement", "file"),
    [
        ("AssertionError: ", "assert rows > 0", THEIRS),
        ("ZeroDivisionError: division by zero", "rows % ranks", THEIRS),
        ("ValueError: not enough values to unpack", "a, b = rows", THEIRS),
        ("RuntimeError: shape is not divisible", "raise RuntimeError(text)", THEIRS),
        ("AssertionError: ", "assert rows % ranks == 0", "/site-packages/torch/fsdp.py"),
    ],
)
def test_other_errors_are_faults(error, statement, file):
    assert refused_size(raised(error, statement, file=file)) == ""


def test_differences_are_faults():
    finding = Finding(check=Check.EQUALITY_GRAD, message="rank 0 raised AssertionError: 3 % 2")
    assert not refused_size(CaseResult(id="a", verdict="fail", seconds=0, findings=(finding,)))
    assert not refused_size(CaseResult(id="a", verdict="pass", seconds=0))
