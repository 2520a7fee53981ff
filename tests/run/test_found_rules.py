"""Rules that are found by trying: those of a small system, and what it cannot be asked for."""

import pytest
import torch

from tests.judge.ruled import Target
from zero_sim.errors import Problem, UsageError
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


def of_sums(engine, wide):
    """A norm of sums of the elements, whose bits no known form has."""
    return torch.stack([grad.float().abs().sum() for grad in wide.values()]).norm()


def test_a_norm_of_no_known_form_is_taken_as_told(quick):
    found = find_rules(Target({"norm": of_sums}))
    assert found.numerics["norm"] == "told"
    assert "norm: no form that is known has its bits: taken as told" in found.unclear


def test_a_norm_that_is_declared_as_told_is_no_contradiction(quick, monkeypatch):
    monkeypatch.setattr(found_rules, "_ALTERNATIVES", {"norm": ("of-elements", "of-params")})
    found = find_rules(Target({}, Numerics(norm="told")))
    assert found.numerics["norm"] == "told"
    assert found.contradicted == []


def test_a_number_that_changes_nothing_here_is_as_declared(quick):
    """Division by 3 in one go, or by 2 and by 1.5, of which the first is exact."""
    does = {"divide": "post-rounded", "told": "after-division"}
    said = Numerics(divide="post-rounded", predivide_by=2.0, grads_told="after-division")
    found = find_rules(Target(does, said))
    assert found.numerics["predivide_by"] == 2.0
    assert "predivide_by = None: the same bits in all of these cases: as declared" in found.unclear


class OneDtype(Target):
    """Weight decay is for bf16 alone."""

    def refuses(self, scenario):
        if scenario.optimizer.weight_decay and scenario.model.dtype != "bf16":
            yield Problem(path="optimizer.weight_decay", message="it is for bf16 alone.")


def test_what_is_asked_in_one_dtype_alone_is_tried_there(quick):
    found = find_rules(OneDtype())
    assert "optimizer.weight_decay" in found.capabilities["follows"]


class Refusing(Target):
    def refuses(self, scenario):
        if scenario.optimizer.weight_decay:
            yield Problem(path="optimizer.weight_decay", message="not with this one.")


def test_what_is_declared_and_refused_here_is_as_declared(quick):
    found = find_rules(Refusing())
    assert found.contradicted == []
    assert any("weight_decay: the case that would tell is refused" in s for s in found.unclear)


class ByDtype(Target):
    """It sums in the params' dtype, and names that for each dtype, which is right or not."""

    def __init__(self, named):
        super().__init__({"divide": "premul-fp32", "sync": "every", "told in": torch.float32})
        self.numerics = lambda scenario: Numerics(
            divide="premul-fp32",
            sync="every",
            told_dtype="fp32",
            reduce_dtype=named[scenario.model.dtype],
        )


@pytest.fixture
def two_dtypes(quick, monkeypatch):
    known = {**FEW, found_rules.DtypeName: ("fp32", "bf16")}
    monkeypatch.setattr(found_rules, "get_args", lambda literal: known.get(literal, ()))


def test_dtypes_that_are_declared_by_case_are_no_contradiction(two_dtypes):
    found = find_rules(ByDtype({"fp32": "fp32", "bf16": None}))
    assert found.contradicted == []
    said = "reduce_dtype = None: what it declares by dtype has the same bits in all of these cases"
    assert said in found.unclear


def test_dtypes_that_are_declared_by_case_and_wrong_are_named(two_dtypes):
    found = find_rules(ByDtype({"fp32": "fp32", "bf16": "fp32"}))
    assert found.contradicted == ["it declares reduce_dtype = 'fp32'; found None"]


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
