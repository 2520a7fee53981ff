"""Models of a target, as workloads."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.own_models import TINY
from zero_sim.errors import UsageError
from zero_sim.scenario.spec import DataSpec, NanSpec
from zero_sim.workloads import build_workload, loss_terms, make_known, params_of

ROW = replace(
    TINY,
    build=lambda: nn.Linear(2, 1),
    batch=lambda generator, rows: torch.randn(rows, 2, generator=generator),
    loss=lambda module, x: module(x).square().mean(),
)
ONCE = nn.Linear(2, 1)


@pytest.fixture
def make_own(make_scenario):
    """Return a function from a model's functions and the case's settings to the workload."""

    def make(own=None, *, dtype="fp32", **functions):
        make_known({"own:m": replace(own or ROW, **functions)})
        return build_workload(make_scenario("own:m", dtype=dtype))

    return make


def test_default_inits_are_repeatable_and_keep_the_generator(make_own):
    before = torch.random.get_rng_state()
    workload = make_own()
    one, two = workload.build(), workload.build()
    assert torch.equal(one.weight, two.weight)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_module_and_floating_inputs_are_cast_and_ties_are_kept(make_own):
    module = make_own(TINY, dtype="bf16").build()
    assert module.head.weight is module.tokens.weight
    assert {param.dtype for param in module.parameters()} == {torch.bfloat16}
    assert make_own(dtype="bf16").batch(step=0, rank=0, micro=0).inputs.dtype == torch.bfloat16


def test_loss_takes_the_tensors_of_the_batch(make_own):
    workload = make_own(TINY)
    batch = workload.batch(step=0, rank=0, micro=0)
    assert batch.rows == 4
    assert [each.shape for each in (batch.inputs, *batch.extra)] == [(4, 3), (4, 3)]
    module = workload.build().eval()
    assert torch.equal(workload.loss(module, batch), TINY.loss(module, batch.inputs, *batch.extra))


def two_losses(module, x):
    return module(x).square().mean(), module(x).abs().mean()


def test_loss_may_have_a_second_term(make_own):
    workload = make_own(loss=two_losses)
    module, batch = workload.build(), workload.batch(step=0, rank=0, micro=0)
    main, second = loss_terms(workload, module, batch)
    assert (main, second) == two_losses(module, batch.inputs)
    assert torch.equal(workload.loss(module, batch), main + second)


def test_params_follow_the_current_model_of_a_name(make_own, make_scenario):
    make_own()
    assert params_of(make_scenario("own:m").model) == (("weight", (1, 2)), ("bias", (1,)))
    make_own(TINY)
    assert len(params_of(make_scenario("own:m").model)) == 5


def test_unknown_own_model_is_refused(make_scenario):
    with pytest.raises(UsageError, match="contains 'own:absent'"):
        build_workload(make_scenario("own:absent"))


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"build": lambda: ONCE}, "the same module again"),
        ({"build": lambda: nn.Sequential(ONCE)}, "in the memory of an earlier module"),
        ({"build": lambda: None}, "return an nn.Module, got None"),
        ({"build": lambda: 1 / 0}, "ZeroDivisionError"),
        ({"batch": lambda generator, rows: torch.randn(rows, 2)}, "from equal generators"),
        ({"batch": lambda generator, rows: [1]}, "a tuple of tensors"),
        ({"batch": lambda generator, rows: (1,)}, "return tensors, got 1"),
        ({"loss": lambda module, x: module(x)}, "0-D tensor that requires grad"),
        ({"loss": lambda module, x: (module(x).mean(), 1.0)}, "requires grad, or two, got 1.0"),
        (
            {"loss": lambda module, x: (module(x).mean(),) * 3},
            "requires grad, or two, got \\(tensor",
        ),
        ({"loss": lambda module, x: module(x, x)}, "`loss` of model 'own:m'.*TypeError"),
        ({"build": lambda: nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))}, "0.running_mean"),
    ],
)
def test_impure_or_invalid_functions_are_refused(make_own, functions, message):
    with pytest.raises(UsageError, match=message):
        make_own(**functions).build()


def test_loss_that_changes_between_calls_is_refused(make_own):
    factors = iter((1.0, 2.0))
    with pytest.raises(UsageError, match="a function of its arguments"):
        make_own(loss=lambda module, x: module(x).sum() * next(factors))


def test_nan_is_planted_without_floating_inputs(make_scenario):
    make_known({"own:m": TINY})
    data = DataSpec(nan=NanSpec(step=0, rank=1))
    workload = build_workload(make_scenario("own:m", data=data))
    losses = [
        workload.loss(workload.build(), workload.batch(step=0, rank=rank, micro=0))
        for rank in range(2)
    ]
    assert [loss.isnan().item() for loss in losses] == [False, True]
