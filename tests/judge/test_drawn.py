"""Targets that draw their own start values."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import nn

from zero_sim.errors import ProtocolError
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.judge.drawn import check_drawn
from zero_sim.judge.facts import Facts
from zero_sim.rules.judging import run_case
from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario, SystemSpec, WorldSpec
from zero_sim.targets import (
    Capabilities,
    FlatShardEngine,
    Numerics,
    Place,
    WholeParamEngine,
    class_of,
    plain_optimizer,
    refusals,
    settings_of,
)

CASE = Scenario(
    schema=1,
    model=ModelSpec(name="params", shapes=((4, 3), (4, 3))),
    world=WorldSpec(size=2),
    system=SystemSpec(stage=1),
    run=RunSpec(steps=2),
)
UNKNOWN = replace(CASE, world=WorldSpec(size=3, order="ring", order_known=False))
WHOLE = replace(CASE, system=SystemSpec(stage=0))


class _Sharded(FlatShardEngine):
    """Draws its shard of each buffer after params are sharded."""

    def draw(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for each in self.buffers.values():
            elems = sum(param.numel() for param in each.named.values())
            with torch.no_grad():
                each.shard[: max(0, elems - each.first)].normal_(generator=generator)
            self.gather(each)


class ByShard:
    """ZeRO-1 whose ranks draw shards, with a seed per rank or one seed."""

    name = "by-shard"
    draws_weights = True
    capabilities = Capabilities(stages=(1,))
    numerics = Numerics(reported_grads="after-division")

    def __init__(self, *, one_seed=False):
        self.one_seed = one_seed

    def build(self, module, *, scenario, group):
        def make(shards):
            spec = scenario.optimizer
            return class_of(spec)(shards.values(), **settings_of(spec))

        engine = _Sharded(module, make, group=group)
        engine.draw(7 if self.one_seed else 7 + group.rank())
        return engine


class ByModule:
    """DDP that draws whole params of a module on the meta device, seeded or not."""

    name = "by-module"
    draws_weights = True
    capabilities = Capabilities(stages=(0,))
    numerics = Numerics(reported_grads="after-division")

    def __init__(self, *, seeded=True, anew=False):
        self.seeded, self.anew = seeded, anew

    def build(self, module, *, scenario, group):
        buffers = [each.clone() for each in module.buffers()]
        module.to("meta").to_empty(device="cpu")
        for empty, kept in zip(module.buffers(), buffers, strict=True):
            empty.copy_(kept)
        if self.seeded:
            torch.manual_seed(3)
        for param in module.parameters():
            if self.anew:
                torch.manual_seed(3)
            nn.init.normal_(param)
        optimizer = plain_optimizer(scenario.optimizer, dict(module.named_parameters()))
        return WholeParamEngine(module, optimizer, group=group)


def found_with(target, case):
    return [(each.check, each.message) for each in run_case(case, target=target).findings]


@pytest.mark.parametrize("target", [ByShard(), ByModule()])
def test_right_draws_pass_in_all_cases(target):
    # Without tied params, which `to_empty` unties.
    fitting = drawn_cases(target, ranks_max=4, models_from=("mlp", "params", "positional"))
    cases = list(islice(draws(fitting, seed="2"), 15))
    assert {run_case(case, target=target).verdict for case in cases} == {"pass"}


@pytest.mark.parametrize("case", [CASE, UNKNOWN])
def test_equal_draws_of_shards_are_found(case):
    assert found_with(ByShard(), case) == []
    (check, message), *_ = found_with(ByShard(one_seed=True), case)
    assert check == "invariant.start"
    assert "begins with the values of" in message


def test_different_draws_of_replicas_are_found():
    (check, message), *_ = found_with(ByModule(seeded=False), WHOLE)
    assert (check, "other values than rank 0" in message) == ("invariant.start", True)


def test_equal_draws_of_params_are_found():
    (check, message), *_ = found_with(ByModule(anew=True), WHOLE)
    assert check == "invariant.start"
    assert message.startswith("param 'p1'[0:12] begins with the values of param 'p0'[0:12]")


def test_undeclared_draws_are_another_finding():
    class Silent(ByModule):
        draws_weights = False

    assert found_with(Silent(), WHOLE)[0][0] != "invariant.start"


@pytest.mark.parametrize(
    "values",
    [
        {"a": torch.zeros(4), "b": torch.zeros(4)},
        {"a": torch.ones(4), "b": torch.ones(4)},
        {"a": torch.eye(2), "b": torch.eye(2)},
        {"a": torch.full((4,), 0.3), "b": torch.full((4,), 0.3)},
        {"a": torch.tensor([0.3]), "b": torch.tensor([0.3])},
        {"a": torch.tensor([0.3, 0.7]).bfloat16(), "b": torch.tensor([0.3, 0.7]).bfloat16()},
    ],
)
def test_constants_and_few_values_are_not_compared(values):
    assert list(check_drawn(values, {}, step=0)) == []


def test_part_on_several_ranks_is_one_draw():
    values, place = {"a": torch.tensor([0.3, 0.7, 0.5])}, Place(param="a", start=0, stop=3)
    assert list(check_drawn(values, {0: [place], 1: [place]}, step=0)) == []


def test_draws_survive_the_wire_between_processes():
    drawn = {"a": torch.tensor([[0.3, -0.7]]).bfloat16(), "b": torch.empty(0, 2)}
    facts = Facts(places=(), addresses={}, shapes={"a": (1, 2), "b": (0, 2)}, drawn=drawn)
    again = Facts.from_dict(facts.as_dict()).drawn
    assert torch.equal(again["a"], drawn["a"])
    assert "b" not in again


@pytest.mark.parametrize(
    ("model", "path"),
    [
        (ModelSpec(name="bit-hash"), "model.name"),
        (ModelSpec(name="mlp", distinct_start=True), "model.distinct_start"),
    ],
)
def test_cases_with_prescribed_start_values_are_refused(model, path):
    target = ByModule()
    target.capabilities = Capabilities(stages=(0,), follows=("model.distinct_start",))
    assert [problem.path for problem in refusals(target, replace(WHOLE, model=model))] == [path]


def test_declaration_that_is_not_a_bool_is_refused():
    target = ByModule()
    target.draws_weights = "yes"
    with pytest.raises(ProtocolError, match="True or False, got 'yes'"):
        refusals(target, WHOLE)
