"""Gradients off by the number of ranks or micro-batches: the finding names the cause."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.judge.newcomer import Newcomer, mean_over_ranks, sgd_of_spec
from tests.judge.ruled import Target as Ruled
from zero_sim import run_case
from zero_sim.findings.ratio import Ratio
from zero_sim.judge.factors import FactorCauses
from zero_sim.reference.bounding import known_sum
from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.targets import Numerics

CASE = Scenario(
    schema=1,
    name="factor",
    model=ModelSpec(name="params", shapes=((3,), (2, 4))),
    world=WorldSpec(size=3),
    system=SystemSpec(stage=0),
    optimizer=OptimizerSpec(name="sgd", lr=0.5),
    run=RunSpec(steps=1, micro_batches=2),
)
ADAMW = replace(CASE, optimizer=OptimizerSpec(lr=0.5))
LOSSES = [(rank, micro) for rank in range(3) for micro in range(2)]


def times(number):
    return lambda grad, group: mean_over_ranks(grad, group) * number


def found(target, case=CASE):
    result = run_case(case, target=target)
    assert result.verdict == "fail", result
    return result.findings[0]


def never_divided(grad, group):
    dist.all_reduce(grad, group=group)
    return grad


@pytest.mark.parametrize(
    ("number", "is_multiple", "is_mean", "divisor", "cause"),
    [
        (3, True, True, 3, "3 x the mean: the sum over 3 ranks was not divided"),
        (6, True, True, 6, "6 x the mean: the sum over 6 micro-batches of all ranks was not"),
        (
            2,
            True,
            True,
            6,
            "2 x the mean: the sum was divided by 3, but not by the 2 micro-batches",
        ),
        (2, False, True, 3, "1/2 of the mean: it was divided by the 2 micro-batches as well"),
        (3, False, True, 3, "1/3 of the mean: it was divided by the 3 ranks once too often"),
        (3, False, False, 3, "1/3 of the sum: it was divided by the 3 ranks already"),
        (2, True, False, 3, "2 x the sum: it was summed over the 2 micro-batches twice"),
    ],
)
def test_numbers_of_the_case_are_causes(number, is_multiple, is_mean, divisor, cause):
    causes = FactorCauses.of(LOSSES, divisor=divisor, is_mean=is_mean)
    ratio = Ratio(number=number, is_multiple=is_multiple, is_rounded=False)
    assert causes.explain(ratio).startswith(cause)


def test_other_numbers_are_not_causes():
    causes = FactorCauses.of(LOSSES, divisor=3)
    assert causes.explain(Ratio(number=5, is_multiple=True, is_rounded=False)) == ""


def test_missing_division_is_the_message():
    finding = found(Newcomer(optimizer=sgd_of_spec, reduce=never_divided, shows_grads=True))
    assert finding.message == (
        "the reduced gradient is 3 x the mean, up to rounding: the sum over 3 ranks was not divided"
    )


def test_declaration_is_proposed_last_and_conditionally():
    detail = found(Newcomer(optimizer=sgd_of_spec, reduce=never_divided, shows_grads=True)).detail
    lead = "\nIf this is intended, declare one of: Numerics(reported_grads='before-division'), "
    assert detail.count("declare") == 1
    assert detail.endswith(f"{lead}Numerics(divide='none')")


def test_sgd_params_alone_show_the_factor():
    """SGD moves a param in proportion to its gradient."""
    finding = found(Newcomer(optimizer=sgd_of_spec, reduce=never_divided))
    assert finding.check == "equality.params"
    assert "the gradient behind it is 3 x the mean: the sum over 3 ranks" in finding.message


def test_adam_params_show_the_factor_by_their_bits():
    finding = found(Newcomer(reduce=never_divided), ADAMW)
    assert finding.check == "equality.params"
    assert finding.message == (
        "the working param differs: its bits are those of a step by 3 x the mean: "
        "the sum over 3 ranks was not divided"
    )


def test_params_without_a_fitting_rule_have_no_cause():
    finding = found(Newcomer(reduce=times(7)), ADAMW)
    assert finding.message == "the working param differs"


def test_factor_of_another_number_has_no_cause():
    finding = found(Newcomer(optimizer=sgd_of_spec, reduce=times(8), shows_grads=True))
    assert finding.message.endswith("every element is 8 x the expected one")


def test_norm_has_a_cause():
    def norm(grads, group):
        return 3 * sum(grad.double().square().sum() for grad in grads.values()).sqrt().float()

    case = replace(CASE, optimizer=replace(CASE.optimizer, clip_norm=100.0))
    finding = found(Newcomer(optimizer=sgd_of_spec, norm=norm), case)
    assert "is 3 x that of the mean, up to rounding: the sum over 3 ranks" in finding.message


@pytest.mark.parametrize(
    ("does", "cause"),
    [
        ({"by": 9.0, "told": "after-division"}, "1/3 of the mean"),
        ({"by": 1.0, "told": "after-division"}, "3 x the mean: the sum over 3 ranks"),
    ],
)
def test_gradients_in_unknown_order_have_a_cause(does, cause):
    case = replace(
        CASE,
        model=ModelSpec(name="mlp", hidden=3, blocks=1),
        world=WorldSpec(size=3, order_known=False),
        optimizer=OptimizerSpec(),
    )
    told = Numerics(reported_grads="after-division")
    finding = found(Ruled(does, told), case)
    assert finding.message.startswith(f"the reduced gradient is {cause}")


def test_bound_that_several_factors_fit_has_no_cause():
    wide = known_sum(torch.zeros(2), [torch.zeros(2)])
    wide = replace(wide, low=wide.low - 8, high=wide.high + 8)
    causes = FactorCauses.of(LOSSES, divisor=3)
    assert causes.explain_within(wide, torch.full((2,), 7.0), divisor=3) == ""
