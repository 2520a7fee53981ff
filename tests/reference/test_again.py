"""Recomputed steps: equal to the original, without effect on the reference."""

from dataclasses import replace

import pytest
import torch

from zero_sim.reference import Reference, Rules, Terms
from zero_sim.scenario.spec import (
    FreezeSpec,
    LossScaleSpec,
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)
from zero_sim.workloads import build_workload

PLAIN = Scenario(
    schema=1,
    name="again",
    model=ModelSpec(name="mlp", dtype="bf16", hidden=3),
    world=WorldSpec(size=3),
    system=SystemSpec(divide="post"),
    run=RunSpec(steps=3, micro_batches=2),
)
CASES = {
    "plain": PLAIN,
    "clipped": replace(PLAIN, optimizer=OptimizerSpec(clip_norm=0.01, clip_value=0.5)),
    "each micro-batch": replace(PLAIN, system=SystemSpec(divide="pre", sync="every")),
    "scaled losses": replace(
        PLAIN, optimizer=OptimizerSpec(loss_scale=LossScaleSpec(initial=8.0, growth_interval=2))
    ),
    "fp8": replace(PLAIN, model=ModelSpec(name="fp8", hidden=4)),
    "experts": replace(
        PLAIN,
        model=ModelSpec(name="moe", hidden=4),
        world=WorldSpec(size=4),
        topology=TopologySpec(ep=2),
    ),
    "frozen": replace(
        PLAIN,
        model=ModelSpec(
            name="params", shapes=((3,), (2, 2)), freeze=(FreezeSpec(param="p0", start=1, stop=2),)
        ),
    ),
}


def reference_of(scenario, rules=None):
    return Reference(scenario, workload=build_workload(scenario), rules=rules)


def values_of(step):
    """Return all tensors of a step by kind and name."""
    flat = {("norm",): step.norm}
    for what in ("grads", "stepped", "masters", "params", "scales"):
        flat |= {(what, name): value for name, value in getattr(step, what).items()}
    for name, state in step.state.items():
        flat |= {("state", name, key): value for key, value in state.items()}
    return {at: value.clone() for at, value in flat.items()}


def bits_of(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def assert_same(one, other):
    assert one.keys() == other.keys()
    for at, value in one.items():
        assert torch.equal(bits_of(value), bits_of(other[at])), at


@pytest.mark.parametrize("rules", [Rules(), Rules(unused="left-alone", norm="of-params")])
@pytest.mark.parametrize("name", CASES)
def test_recomputed_step_is_equal_under_its_own_rules(name, rules):
    reference, alone = reference_of(CASES[name], rules), reference_of(CASES[name], rules)
    taken = []
    for _ in range(3):
        step = reference.step()
        taken.append((step, values_of(step)))
        for earlier, values in taken:
            again = reference.again(earlier)
            by = again.by()
            assert_same(values_of(by.step), values)
            assert_same(
                {at: by.sum(at[1]) for at in values if at[0] == "grads"},
                {at: value for at, value in values.items() if at[0] == "grads"},
            )
            again.by(Rules(divide="pre", sync="every", clip="fp64-division")).step  # noqa: B018
            again.by(terms=Terms(micros=frozenset({1}), is_local=True), rank=1).step  # noqa: B018
        assert_same(values_of(step), values_of(alone.step()))


def test_other_rules_and_terms_change_the_step():
    reference = reference_of(PLAIN)
    again = reference.again(reference.step())
    taken = again.by().step
    rounded = again.by(replace(again.rules, divide="post-rounded")).step
    assert any(not torch.equal(taken.stepped[name], rounded.stepped[name]) for name in taken.grads)
    local = again.by(terms=Terms(is_local=True))
    assert local.at(1) is again.by(terms=Terms(is_local=True), rank=1)
    assert again.by().at(1) is again.by()
    name = next(iter(taken.grads))
    assert not torch.equal(local.at(1).sum(name), local.at(2).sum(name))


def test_large_model_keeps_no_start_of_a_step(monkeypatch):
    monkeypatch.setattr("zero_sim.reference.oracle.KEPT_ELEMS_MAX", 10)
    reference = reference_of(PLAIN)
    step = reference.step()
    assert step.start is None
    assert reference.again(step) is None
    assert (step.masters_before, step.params_before) == ({}, {})


def test_values_before_a_step_equal_those_after_the_previous():
    reference = reference_of(CASES["fp8"])
    values = values_of(reference.step())
    step = reference.step()
    for name, master in step.masters_before.items():
        assert torch.equal(master, values["masters", name])
        param = step.params_before[name]
        assert torch.equal(bits_of(param), bits_of(values["params", name]))
