"""Rules found by search: those of a small system, and the limits of its capabilities."""

import math
import re

import pytest
import torch

from tests.judge.ruled import Engine, Target
from tests.judge.test_declared_rules import norm_of_squares
from tests.own_models import OwnModelTarget
from zero_sim.backends.worlds import WorldPool
from zero_sim.errors import Problem, UsageError
from zero_sim.rules import found as found_rules
from zero_sim.rules import norms as norm_rules
from zero_sim.rules.cases import plain_optimizer
from zero_sim.rules.found import find_rules
from zero_sim.run.small_cases import BASE, changed
from zero_sim.targets import Capabilities, Numerics, WholeParamEngine, settings_of


@pytest.fixture
def quick(monkeypatch):
    """Limit the search to a plain model, optimizer and order; the algorithm is the same."""
    monkeypatch.setattr(found_rules, "get_args", lambda literal: FEW.get(literal, ()))
    kept = ("optimizer.weight_decay", "optimizer.warmup_steps")
    monkeypatch.setattr(found_rules, "FOLLOWED", {p: found_rules.FOLLOWED[p] for p in kept})
    # Many gradients take seconds; a separate test uses them all.
    monkeypatch.setattr(norm_rules, "_NORM_CASES", 2)
    monkeypatch.setattr(norm_rules, "NORMS_MIN", 20)
    monkeypatch.setattr(found_rules, "NORMS_MIN", 20)
    few = ("divide",)
    monkeypatch.setattr(
        found_rules, "_ALTERNATIVES", {name: found_rules._ALTERNATIVES[name] for name in few}
    )


FOLLOWED = found_rules.FOLLOWED
FEW = {
    found_rules.DtypeName: ("bf16",),
    found_rules.ModelName: ("mlp", "fp8"),
    found_rules.OptimizerName: ("adamw", "sgd"),
    found_rules.OrderName: ("linear",),
}


def test_rules_of_a_system_are_found(quick):
    does = {"divide": "premul-fp32", "sync": "every", "told in": torch.float32}
    found = find_rules(Target(does))
    assert found.numerics["divide"] == "premul-fp32"
    assert found.numerics["sync"] == "every"
    assert found.numerics["reported_dtype"] == "fp32"
    assert found.capabilities["dtypes"] == ("bf16",)
    assert found.capabilities["stages"] == (0,)
    assert set(found.capabilities["follows"]) >= {"optimizer.weight_decay"}
    assert "optimizer.warmup_steps" in found.left_out, "it takes no notice of them"
    assert "optimizer.name = 'sgd'" in found.left_out
    assert "model.name = 'fp8'" in found.left_out


def of_sums(engine, wide):
    """Compute a norm from sums of the elements, a form that is not known."""
    return torch.stack([grad.float().abs().sum() for grad in wide.values()]).norm()


def test_norm_of_unknown_form_is_taken_as_reported(quick):
    found = find_rules(Target({"norm": of_sums}))
    assert found.numerics["norm"] == "reported"
    assert (
        "norm: no known form has the bits of all norms of 29 random gradients: taken as reported"
        in (found.unclear)
    )


def test_norm_and_clip_are_found_from_clipped_gradients(quick):
    """Gradients are reported after clipping, so both rules show in the gradient first."""
    reciprocal = lambda norm, bound: torch.clamp(bound / (norm + 1e-6), max=1.0)  # noqa: E731
    does = {"told": "after-clip", "norm": norm_of_squares, "shards": True, "clip": reciprocal}
    found = find_rules(Target(does, stages=(1,)))
    rules = [found.numerics[name] for name in ("reported_grads", "norm", "clip")]
    assert rules == ["after-clip", "of-squares", "fp32-reciprocal"]


def of_long_ones(engine, wide):
    """Compute a norm of elements, but return the next fp32 number for long gradients."""
    elems = sum(grad.numel() for grad in wide.values())
    squares = sum(float(grad.double().square().sum()) for grad in wide.values())
    norm = torch.tensor(squares**0.5, dtype=torch.float32)
    return norm if elems <= 1000 else torch.nextafter(norm, torch.tensor(torch.inf))


@pytest.mark.parametrize(("norm", "rule"), [({}, None), ({"norm": of_long_ones}, "reported")])
def test_norm_rule_is_tested_on_200_random_gradients(norm, rule):
    with WorldPool() as pool:
        found = found_rules._Search(target=Target(norm), pool=pool)
        found.base = changed(BASE, system={"stage": 0})
        found._settle_clip()
        judged = found.search.passed
    assert found.search.numerics.get("norm") == rule
    cases = [case for case in judged if case.name.startswith("norms")]
    sizes = {case: sum(map(math.prod, case.model.shapes)) for case in cases}
    long = [case for case in cases if sizes[case] > 1000]
    assert sum(case.run.steps for case in cases) >= 200
    assert 2 * len(long) >= len(cases)
    assert len({case.world.size for case in cases}) > 2
    assert len(set(sizes.values())) > 5


def test_norm_with_too_few_gradients_is_taken_as_reported(quick, monkeypatch):
    monkeypatch.setattr(norm_rules, "NORMS_MIN", 1000)
    monkeypatch.setattr(found_rules, "NORMS_MIN", 1000)
    found = find_rules(Target({}))
    assert found.numerics["norm"] == "reported"
    assert (
        "norm: only 49 random gradients passed; 1000 distinguish forms: taken as reported"
        in found.unclear
    )


class Divides(Engine):
    """Engine that cuts each param into equal parts for all ranks."""

    def __init__(self, module, scenario, group, does):
        for param in module.parameters():
            assert param.shape[0] % group.size() == 0
        super().__init__(module, scenario, group, does)


class OfEqualParts(Target):
    def build(self, module, *, scenario, group):
        return Divides(module, scenario, group, self.does)


def test_assertion_about_sizes_is_a_limit(quick):
    found = find_rules(OfEqualParts({"divide": "premul-fp32"}))
    assert found.alarms == []
    assert found.contradicted == []
    assert found.numerics["divide"] == "premul-fp32"
    ((check, cases),) = found.limits.items()
    assert re.fullmatch(
        r"AssertionError at test_found\.py:\d+: assert param\.shape\[0\] % .* == 0", check
    )
    assert "bf16, 7 ranks" in cases
    assert found.capabilities["models"] == ("mlp",)


def test_declared_reported_norm_is_not_contradicted(quick, monkeypatch):
    monkeypatch.setattr(found_rules, "_ALTERNATIVES", {"norm": ("of-elements", "of-params")})
    found = find_rules(Target({}, Numerics(norm="reported")))
    assert found.numerics["norm"] == "reported"
    assert found.contradicted == []


def test_number_without_effect_stays_as_declared(quick):
    """One division by 3, or by 2 and by 1.5; the first of the two is exact."""
    does = {"divide": "post-rounded", "told": "after-division"}
    said = Numerics(divide="post-rounded", predivide_by=2.0, reported_grads="after-division")
    found = find_rules(Target(does, said))
    assert found.numerics["predivide_by"] == 2.0
    assert "predivide_by = None: the same bits in all cases: as declared" in found.unclear


class OneDtype(Target):
    """Target that supports weight decay only in bf16."""

    def refuses(self, scenario):
        if scenario.optimizer.weight_decay and scenario.model.dtype != "bf16":
            yield Problem(path="optimizer.weight_decay", message="it is for bf16 alone.")


def test_option_of_a_single_dtype_is_tried_in_it(quick):
    found = find_rules(OneDtype())
    assert "optimizer.weight_decay" in found.capabilities["follows"]


class Refusing(Target):
    def refuses(self, scenario):
        if scenario.optimizer.weight_decay:
            yield Problem(path="optimizer.weight_decay", message="not with this one.")


def test_option_refused_in_the_search_stays_as_declared(quick):
    found = find_rules(Refusing())
    assert found.contradicted == []
    assert any("weight_decay: the deciding case is refused" in s for s in found.unclear)


class ByDtype(Target):
    """Target that sums in the params' dtype and declares a dtype per case, right or wrong."""

    def __init__(self, named):
        super().__init__({"divide": "premul-fp32", "sync": "every", "told in": torch.float32})
        self.numerics = lambda scenario: Numerics(
            divide="premul-fp32",
            sync="every",
            reported_dtype="fp32",
            reduce_dtype=named[scenario.model.dtype],
        )


@pytest.fixture
def two_dtypes(quick, monkeypatch):
    known = {**FEW, found_rules.DtypeName: ("fp32", "bf16")}
    monkeypatch.setattr(found_rules, "get_args", lambda literal: known.get(literal, ()))


def test_right_declaration_by_dtype_is_not_contradicted(two_dtypes):
    found = find_rules(ByDtype({"fp32": "fp32", "bf16": None}))
    assert found.contradicted == []
    said = "reduce_dtype = None: its declaration by dtype has the same bits"
    assert said in found.unclear


def test_wrong_declaration_by_dtype_is_named(two_dtypes):
    found = find_rules(ByDtype({"fp32": "fp32", "bf16": "fp32"}))
    assert found.contradicted == ["it declares reduce_dtype = 'fp32'; found None"]


def test_contradicted_declarations_are_named(quick):
    target = Target({"divide": "premul-fp32"}, Numerics(divide="postmul-rounded"))
    target.capabilities = Capabilities(stages=(0,), follows=("optimizer.warmup_steps",))
    found = find_rules(target)
    said = " ".join(found.contradicted)
    assert "it declares divide = 'postmul-rounded'; found 'premul-fp32'" in said
    assert "it declares to follow optimizer.warmup_steps, but does not here" in said


def test_system_without_a_known_rule_is_refused(quick):
    with pytest.raises(UsageError, match=r"to pass a plain case by some known rule, got equality"):
        find_rules(Target({"by": 17.0}))


class RoundedUp(torch.optim.AdamW):
    @torch.no_grad()
    def step(self):
        super().step()
        for param in self.param_groups[0]["params"]:
            param.copy_(torch.nextafter(param, torch.tensor(torch.inf)))


class RoundedUpTarget:
    name = "rounded-up"
    capabilities = Capabilities(stages=(0,))

    def build(self, module, *, scenario, group):
        optimizer = RoundedUp(module.parameters(), **settings_of(scenario.optimizer))
        return WholeParamEngine(module, optimizer, group=group)


def test_update_with_other_rounding_is_named(quick):
    with pytest.raises(UsageError) as caught:
        find_rules(RoundedUpTarget())
    expected = (
        "got an update that differs from torch's AdamW, first by 1 ulp: the fp32 master differs, "
        "although no gradient differs by Numerics(reported_grads='after-division')"
    )
    assert expected in str(caught.value)
    assert "declare `reference_optimizer`" in str(caught.value)


class ParamsOf:
    """Wrapper that exposes nothing but an engine's params."""

    def __init__(self, engine):
        self.engine, self.module, self.params = engine, engine.module, engine.params
        self.zero_grad, self.backward = engine.zero_grad, engine.backward

    def step(self, *, lr_factor):
        self.engine.step(lr_factor=lr_factor)


class ParamsAlone(Target):
    """Target that reports nothing but params.

    Args:
        does: Non-default behavior.
        capabilities: Declared capabilities.
        engine: Class of its engine.
    """

    def __init__(self, does=None, *, capabilities=None, engine=Engine):
        super().__init__(does)
        self.engine, self.capabilities = engine, capabilities or Capabilities()

    def build(self, module, *, scenario, group):
        return ParamsOf(self.engine(module, scenario, group, self.does))


@pytest.fixture
def quickest(quick, monkeypatch):
    """Limit the search to one dtype and no options; return a function that adds some."""
    known = {**FEW, found_rules.DtypeName: ("fp32",), found_rules.ModelName: ("mlp",)}

    def only(*options, **more):
        known.update({getattr(found_rules, name): words for name, words in more.items()})
        kept = {path: FOLLOWED[path] for path in options}
        monkeypatch.setattr(found_rules, "FOLLOWED", kept)

    monkeypatch.setattr(found_rules, "get_args", lambda literal: known.get(literal, ()))
    only(OptimizerName=("adamw",))
    return only


def test_rules_are_found_from_params_only(quickest):
    found = find_rules(ParamsAlone({"divide": "post"}))
    assert found.numerics == {"divide": "post", "divide_by": "ranks", "sync": "last"}
    assert "divide = 'post-rounded', 'avg': the same bits in all of these cases" in found.unclear


def test_rule_that_fits_all_dtypes_is_chosen(quickest):
    quickest(DtypeName=("fp32", "bf16"))
    found = find_rules(ParamsAlone({"divide": "premul-fp32"}))
    assert found.numerics["divide"] == "premul-fp32"
    assert found.capabilities["dtypes"] == ("fp32", "bf16")


class DividesTwice(Engine):
    """Engine that divides once more by the number of ranks, which a single rank does not show."""

    def count(self):
        return super().count() ** 2


def test_no_rule_for_several_ranks_is_an_alarm(quickest):
    found = find_rules(ParamsAlone(engine=DividesTwice))
    assert "world_size_max" not in found.capabilities
    (alarm,) = found.alarms
    assert alarm.startswith("no known rule gives the results of 3 ranks; the nearest, ")
    assert "case '3 ranks': equality.params" in alarm


class OneRank(Target):
    def refuses(self, scenario):
        if scenario.world.size > 1:
            yield Problem(path="world.size", message="it is for one rank.")


def test_world_size_is_limited_to_one_if_more_is_refused(quickest):
    found = find_rules(OneRank())
    assert found.capabilities["world_size_max"] == 1
    assert found.alarms == []


class StepsOnce(Engine):
    def update(self, wide):
        if not self.optimizer.state:
            super().update(wide)


def test_system_without_a_passing_case_is_an_alarm(quickest):
    found = find_rules(ParamsAlone(engine=StepsOnce))
    (alarm,) = found.alarms
    assert alarm.startswith("dtypes, optimizers, models, stages, orders = (): nothing passes")
    assert "in case 'fp32, 3 ranks, three steps'" in alarm


class LastMicroBatch(Engine):
    """Engine that drops all micro-batches but the last."""

    def backward(self, loss, *, last_micro, rows):
        self.local = {}
        super().backward(loss, last_micro=last_micro, rows=rows)


def test_several_micro_batches_are_optional(quickest):
    quickest("run.micro_batches")
    found = find_rules(ParamsAlone(engine=LastMicroBatch))
    assert "run.micro_batches" in found.left_out
    assert found.alarms == []
    assert any(s.startswith("fp32: no rule fits several micro-batches") for s in found.unclear)


def test_loss_scale_needs_skipped_steps(quickest):
    quickest("optimizer.loss_scale")
    assert "optimizer.loss_scale" in find_rules(ParamsAlone()).left_out


def test_optimizer_is_tried_with_the_supported_settings(quickest):
    """The engine always runs AdamW, which equals Adam without decay."""
    quickest("optimizer.weight_decay", OptimizerName=("adamw", "adam"))
    said = Capabilities(stages=(0,), optimizers=("adamw", "adam"))
    found = find_rules(ParamsAlone(capabilities=said))
    why = "with optimizer.weight_decay, which it follows otherwise: equality.params"
    assert found.left_out["optimizer.name = 'adam'"].startswith(why)
    assert found.contradicted[0].startswith(f"it declares optimizers with 'adam'; {why}")


@pytest.mark.parametrize(("factor", "word"), [(1, None), (1 / 2, "1/cp")])
def test_factor_of_a_second_loss_is_found(factor, word):
    with WorldPool() as pool:
        search = found_rules._Search(target=Target({"second": lambda engine: factor}), pool=pool)
        search.base = changed(BASE, system={"stage": 0})
        search._settle_second_loss()
    assert search.search.numerics == {"scale_second": word}
    assert not search.found.left_out


def test_target_with_only_its_own_model_is_searched_with_it():
    with WorldPool() as pool:
        search = found_rules._Search(target=OwnModelTarget(), pool=pool)
        search._find_base()
    assert (search.base.model.name, search.base.world.size) == ("own:tiny", 3)
    assert search.found.alarms == []


def test_plain_case_uses_the_only_update_rule_of_a_target():
    class Own(OwnModelTarget):
        capabilities = Capabilities(optimizers=("own",))

        def reference_step(self, param, grad, state, settings):
            param.sub_(settings["lr"] * grad.sign())

    assert plain_optimizer(Own()) == {"name": "own"}
    assert plain_optimizer(OwnModelTarget()) == {}
