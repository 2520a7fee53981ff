"""Rules that are found by trying: those of a small system, and what it cannot be asked for."""

import pytest
import torch

from tests.judge.ruled import Target
from zero_sim.errors import UsageError
from zero_sim.findings.records import CaseResult, Finding
from zero_sim.judge.rules import RulesTried
from zero_sim.run import found_rules
from zero_sim.run.found_rules import declared_by, find_rules
from zero_sim.targets import Capabilities, Numerics


@pytest.fixture
def quick(monkeypatch):
    """Only what one plain model, one optimizer and one order show: the search is the same."""
    monkeypatch.setattr(found_rules, "get_args", lambda literal: FEW.get(literal, ()))
    kept = ("optimizer.weight_decay", "optimizer.warmup_steps")
    monkeypatch.setattr(found_rules, "FOLLOWED", {p: found_rules.FOLLOWED[p] for p in kept})
    few = ("divide",)
    monkeypatch.setattr(
        found_rules, "_ALTERNATIVES", {name: found_rules._ALTERNATIVES[name] for name in few}
    )


FEW = {
    found_rules.DtypeName: ("bf16",),
    found_rules.ModelName: ("mlp", "fp8"),
    found_rules.OptimizerName: ("adamw", "sgd"),
    found_rules.OrderName: ("linear",),
}


def test_the_rules_of_a_system_are_found(quick):
    does = {"divide": "premul-fp32", "sync": "every", "told in": torch.float32}
    found = find_rules(Target(does))
    assert found.numerics["divide"] == "premul-fp32"
    assert found.numerics["sync"] == "every"
    assert found.numerics["told_dtype"] == "fp32"
    assert found.capabilities["dtypes"] == ("bf16",)
    assert found.capabilities["stages"] == (0,)
    assert set(found.capabilities["follows"]) >= {"optimizer.weight_decay"}
    assert "optimizer.warmup_steps" in found.left_out, "it takes no notice of them"
    assert "optimizer.name = 'sgd'" in found.left_out
    assert "model.name = 'fp8'" in found.left_out


def test_what_is_declared_otherwise_is_named(quick):
    target = Target({"divide": "premul-fp32"}, Numerics(divide="postmul-rounded"))
    target.capabilities = Capabilities(stages=(0,), follows=("optimizer.warmup_steps",))
    found = find_rules(target)
    said = " ".join(found.contradicted)
    assert "it declares divide = 'postmul-rounded'; found 'premul-fp32'" in said
    assert "it declares to follow optimizer.warmup_steps, and does not here" in said


def test_a_system_that_follows_no_known_rule_is_refused(quick):
    with pytest.raises(UsageError, match=r"to pass a plain case by some known rule, got equality"):
        find_rules(Target({"by": 17.0}))


def test_what_is_to_be_declared_is_read_from_the_first_finding():
    detail = "more\nthese are its bits: declare Numerics(divide='pre', divide_by='tokens'), if so"
    finding = Finding(check="equality.grad", message="", detail=detail)
    result = CaseResult(id="a", verdict="fail", seconds=0.0, findings=(finding,))
    assert declared_by(result) == [{"divide": "pre", "divide_by": "tokens"}]
    assert declared_by(CaseResult(id="a", verdict="pass", seconds=0.0)) == []


@pytest.mark.parametrize(
    "fitting",
    [
        ("clip = 'a'", "clip = 'b'", "clip = 'c'"),
        ("divide = 'pre', sync = 'every'", "divide_by = 'tokens'"),
        ("divide = 'pre'",),
    ],
)
def test_all_that_fits_is_read(fitting):
    tried = RulesTried(assumed="clip = 'x'", tried=9, fitting=fitting)
    finding = Finding(check="equality.grad", message="", detail=tried.in_words())
    read = declared_by(CaseResult(id="a", verdict="fail", seconds=0.0, findings=(finding,)))
    assert [", ".join(f"{n} = {v!r}" for n, v in each.items()) for each in read] == list(fitting)
