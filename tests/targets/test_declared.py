"""Declarations of targets: refused cases, and the rules that the reference replays."""

from dataclasses import replace
from itertools import islice

import pytest

from zero_sim.errors import Problem, ProtocolError, ScenarioError, UsageError
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.scenario.spec import (
    ExpectSpec,
    ModelSpec,
    OneRankSpec,
    OptimizerSpec,
    ReloadSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
    WorldSpec,
)
from zero_sim.sim.order_backends import ORDERS
from zero_sim.targets import (
    Capabilities,
    Numerics,
    check_supported,
    find_target,
    reduce_ops_of,
    refusals,
    shapes_of,
)

BARE = ModelSpec(name="params", shapes=((3,), (2,)))
PLAIN = Scenario(schema=1, model=ModelSpec(name="mlp"), optimizer=OptimizerSpec(lr=0.5))


class Modest:
    name = "modest"

    def build(self, module, *, scenario, group):
        raise AssertionError("not built here")


def paths(scenario, **declared):
    target = Modest()
    for name, value in declared.items():
        setattr(target, name, value)
    return [problem.path for problem in refusals(target, scenario)]


def test_plainest_case_is_within_any_capabilities():
    assert paths(PLAIN) == []


@pytest.mark.parametrize(
    ("parts", "path"),
    [
        ({"model": ModelSpec(name="unusual")}, "model.name"),
        ({"model": ModelSpec(name="mlp", dtype="bf16")}, "model.dtype"),
        ({"model": replace(BARE, tied=("p0",))}, "model.tied"),
        ({"model": replace(BARE, unused=("p1",))}, "model.unused"),
        ({"model": replace(BARE, one_rank=(OneRankSpec(param="p1", rank=0),))}, "model.one_rank"),
        ({"optimizer": OptimizerSpec(name="sgd")}, "optimizer.name"),
        ({"optimizer": OptimizerSpec(clip_norm=1.0)}, "optimizer.clip_norm"),
        ({"world": WorldSpec(order="ring")}, "world.order"),
        ({"system": SystemSpec(sync="every")}, "system.sync"),
        ({"system": SystemSpec(redundancy=2)}, "system.redundancy"),
        ({"system": SystemSpec(bucket_elems=4)}, "system.bucket_elems"),
        ({"topology": TopologySpec(tp=2)}, "topology.tp"),
        ({"run": RunSpec(micro_batches=2)}, "run.micro_batches"),
        ({"reload": ReloadSpec(step=1)}, "reload"),
    ],
)
def test_undeclared_option_is_refused_by_its_path(parts, path):
    assert paths(replace(PLAIN, **parts)) == [path]


def test_target_with_unknown_order_refuses_every_known_order():
    able = Capabilities(orders=("unknown",))
    assert paths(PLAIN, capabilities=able) == ["world.order_known"]
    assert paths(replace(PLAIN, world=WorldSpec(order_known=False)), capabilities=able) == []


def test_all_problems_are_reported_at_once():
    scenario = replace(PLAIN, system=SystemSpec(sync="every"), run=RunSpec(micro_batches=2))
    assert paths(scenario) == ["system.sync", "run.micro_batches"]


def test_followed_option_is_accepted():
    able = Capabilities(follows=("system.sync", "run.micro_batches"))
    scenario = replace(PLAIN, system=SystemSpec(sync="every"), run=RunSpec(micro_batches=2))
    assert paths(scenario, capabilities=able) == []


@pytest.mark.parametrize(
    ("only", "refused"),
    [
        (("reload.form", ("sharded",)), ["reload.form"]),
        (("reload.weights_only", (False,)), ["reload.weights_only"]),
        (("reload.form", ("consolidated",)), []),
        (("system.redundancy", (1, 2)), []),
    ],
)
def test_option_may_be_followed_for_some_values_only(only, refused):
    able = Capabilities(follows=("reload",), only=(only,))
    reload = ReloadSpec(step=1, form="consolidated", weights_only=True)
    scenario = replace(PLAIN, run=RunSpec(steps=2), reload=reload)
    assert paths(scenario, capabilities=able) == refused


def test_restriction_of_an_unknown_field_is_refused():
    with pytest.raises(UsageError, match=r"path of an entry of Capabilities\.only"):
        Capabilities(only=(("reload.shape", ("sharded",)),))
    with pytest.raises(UsageError, match="a path and a tuple of values"):
        Capabilities(only=("reload.form",))


def test_scenario_may_repeat_a_declared_numeric_rule():
    premul = replace(PLAIN, system=SystemSpec(divide="premul"))
    assert paths(premul, numerics=Numerics(divide="premul")) == []
    assert paths(premul, numerics=Numerics(divide="pre")) == ["system.divide"]


@pytest.mark.parametrize(
    ("shape", "able"), [((), {"scalar_params": False}), ((0, 2), {"empty_params": False})]
)
def test_unsupported_shapes_are_refused(shape, able):
    scenario = replace(PLAIN, model=ModelSpec(name="params", shapes=((3,), shape)))
    assert paths(scenario, capabilities=Capabilities(**able)) == ["model.shapes[1]"]
    assert paths(scenario) == []


def test_too_many_ranks_are_refused():
    scenario = replace(PLAIN, world=WorldSpec(size=4))
    assert paths(scenario, capabilities=Capabilities(world_size_max=3)) == ["world.size"]


def test_target_may_add_refusals():
    mine = Problem(path="data.rows", message="expected an even number, got 3.")
    assert paths(PLAIN, refuses=lambda scenario: [mine]) == ["data.rows"]


@pytest.mark.parametrize(
    "refuses", [lambda scenario: ("2D params only",), lambda scenario: "2D params only"]
)
def test_target_may_refuse_in_plain_words(refuses):
    target = Modest()
    target.refuses = refuses
    with pytest.raises(ScenarioError, match=r"system\.target: 2D params only"):
        check_supported(target, PLAIN)


def test_zero_sim_refuses_nothing():
    scenario = replace(PLAIN, model=ModelSpec(name="unusual"), system=SystemSpec(sync="every"))
    assert refusals(find_target("zero_sim"), scenario) == ()


def test_reference_replays_declared_numerics():
    numerics = Numerics(divide="premul", grad_dtype="fp32")
    system = numerics.replayed(replace(PLAIN, system=SystemSpec(sync="every"))).system
    assert (system.divide, system.grad_dtype, system.sync) == ("premul", "fp32", "every")


@pytest.mark.parametrize("order", ORDERS)
def test_avg_follows_the_order_of_reduction(order):
    divide = {"divide": "post", "premultiply": "premul"}
    averaging = ORDERS[order](0).averaging
    scenario = replace(PLAIN, world=WorldSpec(size=2, order=order))
    avg = Numerics(divide="avg")
    if averaging == "postmultiply":
        assert paths(scenario, capabilities=Capabilities(orders=(order,)), numerics=avg) == [
            "world.order"
        ]
    else:
        assert avg.replayed(scenario).system.divide == divide[averaging]


def test_avg_follows_the_backends_own_order():
    assert Numerics(divide="avg").replayed(PLAIN, added_in="nccl-ring").system.divide == "premul"


RELOADING = Capabilities(follows=("reload",), world_size_max=3)
GROWS = replace(PLAIN, reload=ReloadSpec(step=1, world_size=4))


def test_world_after_a_reload_is_checked_against_capabilities():
    assert paths(GROWS, capabilities=RELOADING) == ["reload.world_size"]
    smaller = replace(PLAIN, reload=ReloadSpec(step=1, world_size=3))
    assert paths(smaller, capabilities=RELOADING) == []


def test_layout_after_a_reload_is_refused_if_not_followed():
    scenario = replace(PLAIN, reload=ReloadSpec(step=1, bucket_elems=4))
    assert paths(scenario, capabilities=RELOADING) == ["reload.bucket_elems"]


def test_own_refusals_are_applied_to_the_world_after_a_reload():
    def refuses(scenario):
        if scenario.world.size > 3:
            yield Problem(path="world.size", message="expected at most 3.")

    able = Capabilities(follows=("reload",))
    assert paths(GROWS, capabilities=able, refuses=refuses) == ["reload.world_size"]


def test_problem_before_and_after_a_reload_is_reported_once():
    mine = Problem(path="data.rows", message="expected an even number, got 3.")
    able = Capabilities(follows=("reload",))
    assert paths(GROWS, capabilities=able, refuses=lambda scenario: [mine]) == ["data.rows"]


BY_PARAMS = {
    "numerics": Numerics(norm="of-params"),
    "capabilities": Capabilities(follows=("optimizer.clip_norm", "topology.tp")),
}
CLIPPED = replace(PLAIN, optimizer=OptimizerSpec(clip_norm=1.0), world=WorldSpec(size=2))


@pytest.mark.parametrize(
    ("parts", "path"),
    [
        ({}, []),
        ({"topology": TopologySpec(tp=2)}, ["optimizer.clip_norm"]),
        ({"world": WorldSpec(size=2, order_known=False)}, ["world.order_known"]),
    ],
    ids=["one cell", "a norm over cells", "an unknown order"],
)
def test_norm_of_param_norms_is_refused_without_a_proven_bound(parts, path):
    assert paths(replace(CLIPPED, **parts), **BY_PARAMS) == path
    unclipped = replace(CLIPPED, optimizer=PLAIN.optimizer, **parts)
    assert paths(unclipped, **BY_PARAMS) == []


@pytest.mark.parametrize(
    ("declare", "words"),
    [
        (lambda: Capabilities(follows=("optimizer.clipnorm",)), "Try 'optimizer.clip_norm'."),
        (lambda: Capabilities(follows=("clip",)), "one of 'system.target', 'system.stage', "),
        (
            lambda: Capabilities(follows="reload"),
            "Capabilities.follows to be a tuple, got 'reload'",
        ),
        (
            lambda: Capabilities(stages=(4,)),
            "entry of Capabilities.stages to be one of 0, 1, 2, 3, got 4",
        ),
        (lambda: Capabilities(stages=(True,)), "one of 0, 1, 2, 3, got True"),
        (lambda: Capabilities(models="mlp"), "Capabilities.models to be a tuple"),
        (lambda: Capabilities(orders=("rings",)), "Try 'ring'."),
        (lambda: Capabilities(dtypes=(None,)), "'fp32', 'bf16', 'fp16', got None"),
        (lambda: Capabilities(empty_params=1), "one of True, False, got 1"),
        (lambda: Capabilities(world_size_max=0), "at least 1, or None for any number, got 0"),
        (lambda: Numerics(divide="premult"), "Try 'premul'."),
        (lambda: Numerics(clip="fp32"), "expected Numerics.clip to be one of 'fp32-division', "),
        (
            lambda: Numerics(norm="of-rows", clip="fp64-root-inverse"),
            "got norm = 'of-rows'. Try clip = 'fp64-inverse'.",
        ),
    ],
)
def test_unknown_value_in_a_declaration_is_refused(declare, words):
    with pytest.raises(UsageError) as refused:
        declare()
    assert words in str(refused.value)


@pytest.mark.parametrize("name", ["capabilities", "numerics"])
@pytest.mark.parametrize("value", [{"stages": (0,)}, 5, Capabilities, "everything"])
def test_declaration_of_another_type_is_an_error(name, value):
    with pytest.raises(ProtocolError, match=f"expected '{name}' of target 'modest' to be zero_sim"):
        paths(PLAIN, **{name: value})


def raises(scenario):
    raise KeyError("lost")


@pytest.mark.parametrize(
    ("refuses", "words"),
    [
        (lambda scenario: None, "an iterable of strings or zero_sim.errors.Problem, got"),
        (lambda scenario: [True], "got (True,)"),
        (lambda: (), "got TypeError: "),
        (raises, "got KeyError: 'lost'"),
    ],
)
def test_invalid_refusals_of_a_target_are_an_error(refuses, words):
    with pytest.raises(ProtocolError) as refused:
        paths(PLAIN, refuses=refuses)
    assert "`refuses` of target 'modest'" in str(refused.value)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (lambda scenario: None, "got None"),
        (lambda scenario: ("MEAN",), "got ('MEAN',)"),
        (lambda scenario: ["AVG"], "got ['AVG']"),
        (raises, "got KeyError: 'lost'"),
    ],
)
def test_invalid_reduce_ops_are_an_error(told, words):
    target = Modest()
    target.reduce_ops = told
    with pytest.raises(ProtocolError) as refused:
        reduce_ops_of(target, PLAIN)
    assert "`reduce_ops` of target 'modest'" in str(refused.value)
    assert words in str(refused.value)


def test_refusal_suggests_how_to_declare_the_option():
    (problem,) = refusals(Modest(), replace(PLAIN, optimizer=OptimizerSpec(clip_norm=1.0)))
    assert "follows=('optimizer.clip_norm',)" in problem.suggestion


def test_one_device_is_refused_with_loss_scaling():
    """A single device does not know the rounded factor."""
    case = replace(PLAIN, expect=ExpectSpec(one_device=True))
    assert paths(case, numerics=Numerics(scale_loss="tokens")) == ["expect.one_device"]


def test_unreported_root_factor_is_refused_in_an_unknown_order():
    able = Capabilities(follows=("optimizer.clip_norm",))
    unknown = WorldSpec(order_known=False)
    clipped = replace(PLAIN, optimizer=OptimizerSpec(clip_norm=1.0), world=unknown)
    for clip, refused in (("fp64-root-division", ["world.order_known"]), ("fp64-division", [])):
        assert paths(clipped, capabilities=able, numerics=Numerics(clip=clip)) == refused


def test_refuses_can_read_the_shapes_of_a_case():
    class Divided(Modest):
        capabilities = Capabilities()

        def refuses(self, scenario):
            for name, shape in shapes_of(scenario).items():
                if shape and shape[0] % scenario.world.size:
                    yield f"expected rows of {name} that {scenario.world.size} divides"

    (problem,) = refusals(Divided(), replace(PLAIN, model=BARE))
    assert problem.message == "expected rows of p0 that 2 divides"
    cases = list(islice(draws(drawn_cases(Divided()), seed="4"), 30))
    assert len(cases) == 30
    assert {case.world.size for case in cases} > {1}
