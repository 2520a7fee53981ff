"""Minimal engines: they are judged, and anything they do not report is listed as not observed."""

from typing import ClassVar

import pytest
import torch

from tests.run.summing import Engine
from zero_sim import run_case
from zero_sim.errors import UsageError
from zero_sim.scenario.spec import (
    DataSpec,
    ModelSpec,
    OptimizerSpec,
    ReloadSpec,
    RunSpec,
    Scenario,
    WorldSpec,
)
from zero_sim.targets import Capabilities, Numerics, StepResult, complete


class Least(Engine):
    """All-reduce, divide, AdamW."""

    averages, keeps = True, False

    def __init__(self, module, scenario, group):
        settings = {"averages": self.averages, "keeps": self.keeps}
        super().__init__(module, scenario, group, **settings)


class Target:
    name = "least"

    def __init__(self, engine=Least, numerics=None, capabilities=None):
        self.engine, self.numerics = engine, numerics
        if capabilities == "everything":
            self.capabilities = None

    def build(self, module, *, scenario, group):
        return self.engine(module, scenario, group)


def judge(pool, target, **parts):
    scenario = Scenario(
        schema=1, name="case", world=WorldSpec(size=3),
        **({"model": ModelSpec(name="mlp", hidden=3), "optimizer": OptimizerSpec(lr=0.1)} | parts),
    )  # fmt: skip
    return run_case(scenario, pool=pool, target=target)


def unobserved(result):
    return next(note for note in result.notes if note.startswith("not observed"))


def test_minimal_engine_passes_and_notes_list_unobserved_parts(pool):
    result = judge(pool, Target())
    assert (result.verdict, result.findings) == ("pass", ())
    for what in ("masters and optimizer state", "reduced gradients", "padding", "norm", "skipped"):
        assert what in unobserved(result)


class WithoutDividing(Least):
    averages = False


def test_wrong_divisor_is_found_in_reported_gradients(pool):
    shown = Numerics(grads_in_params=True, reported_grads="after-division")
    assert judge(pool, Target(numerics=shown)).verdict == "pass"
    result = judge(pool, Target(WithoutDividing, numerics=shown))
    assert result.findings[0].check == "equality.grad"
    assert result.verdict == "fail"


class ShowsTheSums(Least):
    keeps = True


@pytest.mark.parametrize(
    ("engine", "declared", "right"),
    [(Least, "before-division", "after"), (ShowsTheSums, "after-division", "before")],
)
def test_gradient_on_the_other_side_of_the_division_is_named(pool, engine, declared, right):
    shown = Numerics(grads_in_params=True, reported_grads=declared)
    (finding,) = judge(pool, Target(engine, numerics=shown)).findings
    assert finding.check == "equality.grad"
    assert f"these are its bits {right} the division by 3.\n" in finding.detail
    assert f"Numerics(reported_grads='{right}-division')" in finding.detail


def test_norm_not_reported_by_a_clipping_engine_is_not_observed(pool):
    clips = Numerics(norm="of-params", clip="fp32-reciprocal")
    target = Target(numerics=clips)
    target.capabilities = Capabilities(follows=("optimizer.clip_norm",))
    result = judge(pool, target, optimizer=OptimizerSpec(lr=0.1, clip_norm=0.05))
    assert (result.verdict, result.findings) == ("pass", ())
    assert "norm" in unobserved(result)


def test_reported_gradients_are_compared_in_param_order(pool):
    """Otherwise each process would report another finding of the same case."""
    shown = Numerics(grads_in_params=True, reported_grads="before-division")
    (finding,) = judge(pool, Target(numerics=shown)).findings
    ends = [f"{block}.{layer}.{kind}" for block in (0, 1) for layer in ("up", "down")
            for kind in ("weight", "bias")]  # fmt: skip
    told = [line for line in finding.detail.splitlines() if line.startswith("  rank 0 param ")]
    assert [line.split("'")[1] for line in told] == ends


def test_reported_gradients_are_not_listed_as_unobserved(pool):
    shown = Numerics(grads_in_params=True, reported_grads="after-division")
    assert "reduced gradients" not in unobserved(judge(pool, Target(numerics=shown)))


def test_param_without_its_reported_gradient_is_a_finding(pool):
    class Forgetful(Least):
        def step(self, *, lr_factor):
            super().step(lr_factor=lr_factor)
            next(iter(self.module.parameters())).grad = None

    shown = Numerics(grads_in_params=True, reported_grads="after-division")
    result = judge(pool, Target(Forgetful, numerics=shown))
    assert "has no gradient" in result.findings[0].message


def test_wrong_param_on_one_rank_is_a_finding(pool):
    class Stale(Least):
        def step(self, *, lr_factor):
            super().step(lr_factor=lr_factor)
            if self.group.rank() == 2:
                next(self.module.parameters()).data[0] += 1

    result = judge(pool, Target(Stale))
    assert (result.findings[0].check, result.findings[0].rank) == ("equality.params", 2)


def test_reload_is_refused_for_an_engine_without_save(pool):
    target = Target(capabilities="everything")
    result = judge(pool, target, reload=ReloadSpec(step=1), run=RunSpec(steps=2))
    assert result.verdict == "error"
    assert "save() and load()" in result.error


def test_engine_learns_of_the_last_micro_batch_before_its_forward(pool):
    calls = []

    class ReportedStats(Least):
        def start_micro_batch(self, *, last):
            calls.append(last)

        def backward(self, loss, *, last_micro, rows):
            assert calls[-1] == last_micro
            loss.backward()

    judge(
        pool,
        Target(ReportedStats, capabilities="everything"),
        run=RunSpec(steps=1, micro_batches=2),
    )
    assert sorted(calls) == [False] * 3 + [True] * 3


def test_step_that_returns_none_is_an_empty_result():
    class Silent:
        module = torch.nn.Linear(1, 1)
        zero_grad = backward = params = None

        def step(self, *, lr_factor):
            return None

    assert complete(Silent()).step(lr_factor=1.0) == StepResult()


def test_missing_required_methods_are_named():
    class Half:
        module = None

        def step(self, *, lr_factor):
            return None

    with pytest.raises(UsageError, match="without zero_grad, backward, params"):
        complete(Half())


def test_adapting_an_adapted_engine_returns_it():
    class All:
        module = torch.nn.Linear(1, 1)
        zero_grad = Least.zero_grad
        backward, step, params = Least.backward, Least.step, Least.params

    once = complete(All())
    assert complete(once) is once


def test_missing_join_micro_batch_is_named(pool):
    run = RunSpec(steps=1, micro_batches=2, own_micro_batches=(2, 1))
    result = judge(pool, Target(capabilities="everything"), run=run)
    assert result.verdict == "error"
    assert "expected Least to have join_micro_batch(*, last)" in result.error


def test_uneven_micro_batches_are_refused_if_not_followed(pool):
    run = RunSpec(steps=1, micro_batches=2, own_micro_batches=(2, 1))
    result = judge(pool, Target(), run=run)
    assert result.verdict == "error"
    assert "run.own_micro_batches" in result.error


class OfOtherNames(Least):
    """An engine with its own names for params."""

    def __init__(self, module, scenario, group):
        super().__init__(module, scenario, group)
        self.names = {f"flat/{i}": name for i, name in enumerate(dict(module.named_parameters()))}

    def params(self):
        return {f"flat/{i}": param for i, param in enumerate(self.module.parameters())}


def test_engine_may_report_params_under_its_own_names(pool):
    assert judge(pool, Target(OfOtherNames)).verdict == "pass"


def test_names_that_are_not_a_mapping_are_an_error(pool):
    class Wrong(OfOtherNames):
        def __init__(self, module, scenario, group):
            super().__init__(module, scenario, group)
            self.names = ["a"]

    result = judge(pool, Target(Wrong))
    assert result.verdict == "error"
    assert "expected `names` of Wrong to be a mapping of its own names" in result.error


@pytest.mark.parametrize("names", [{1: "a"}, {"a": 1}])
def test_names_that_are_not_strings_are_an_error(pool, names):
    class Wrong(OfOtherNames):
        def __init__(self, module, scenario, group):
            super().__init__(module, scenario, group)
            self.names = names

    result = judge(pool, Target(Wrong))
    assert result.verdict == "error"
    assert "got a dict with 1 (int), which is no string. Rename the attribute" in result.error


class Sharded(torch.Tensor):
    """A tensor with the attribute that identifies a DTensor."""

    def full_tensor(self):
        return self


def test_sharded_tensors_are_not_expected_equal_on_all_ranks():
    module = torch.nn.Linear(1, 1)
    module.register_buffer("rows", torch.ones(2).as_subclass(Sharded))
    module.register_buffer("mean", torch.ones(2))
    engine = Least(module, Scenario(schema=1, model=ModelSpec(name="mlp")), None)
    assert set(complete(engine).module_tensors()) == {"weight", "bias", "mean"}


class Starts(Least):
    """Records the rows of each step and checks that no forward came before."""

    seen: ClassVar[list] = []

    def start_step(self, *, rows):
        self.seen.append((self.group.rank(), list(rows)))
        self.left = list(rows)

    def backward(self, loss, *, last_micro, rows):
        assert rows == self.left.pop(0)
        super().backward(loss, last_micro=last_micro, rows=rows)

    def join_micro_batch(self, *, last):
        for param in self.module.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad


def test_start_step_receives_all_rows_before_the_first_forward(pool, monkeypatch):
    monkeypatch.setattr(Starts, "seen", [])
    target = Target(Starts)
    target.capabilities = Capabilities(follows=("run.micro_batches", "run.own_micro_batches"))
    run = RunSpec(steps=2, micro_batches=2, own_micro_batches=(1, 2))
    data = DataSpec(rows=3, uneven_rows=True)
    result = judge(pool, target, run=run, data=data)
    assert (result.verdict, result.findings) == ("pass", ())
    by_rank = {rank: [rows for each, rows in Starts.seen if each == rank] for rank in range(3)}
    assert by_rank == {0: [[3], [3, 3]], 1: [[4, 4], [4]], 2: [[5], [5, 5]]}


def test_start_step_without_rows_is_an_error(pool):
    class Takes(Least):
        def start_step(self):
            pass

    result = judge(pool, Target(Takes))
    assert result.verdict == "error"
    assert "start_step(*, rows)" in result.error


class Split(Least):
    """Receives the terms of a loss separately."""

    factor = 1.0

    def backward_terms(self, loss, second, *, last_micro, rows):
        self.backward(loss + second * self.factor, last_micro=last_micro, rows=rows)


class Dropping(Split):
    """Drops the second term."""

    factor = 0.0


@pytest.mark.parametrize(
    ("engine", "verdict"), [(Least, "pass"), (Split, "pass"), (Dropping, "fail")]
)
def test_engine_may_receive_two_loss_terms(pool, engine, verdict):
    """An engine without `backward_terms` gets the sum."""
    result = judge(pool, Target(engine), model=ModelSpec(name="multi-token", hidden=2))
    assert result.verdict == verdict
