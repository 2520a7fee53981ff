"""Invalid return values of an engine: the error names the method and never blames the judge."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_sim import run_case
from zero_sim.errors import ProtocolError
from zero_sim.scenario.spec import (
    FreezeSpec,
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.targets import Capabilities, OwnedPart, Place, Settings, StepResult, complete


class Engine:
    """A correct engine with every optional method: all-reduce, divide, SGD on whole params."""

    def __init__(self, module, scenario, group):
        self.module, self.group, self.bare = module, group, module
        self.named = dict(module.named_parameters())
        self.optimizer = torch.optim.SGD(self.named.values(), lr=scenario.optimizer.lr)

    def zero_grad(self):
        self.optimizer.zero_grad()

    def start_micro_batch(self, *, last):
        pass

    def backward(self, loss, *, last_micro, rows):
        loss.backward()

    def step(self, *, lr_factor):
        self.reduced = {}
        for name, param in self.named.items():
            dist.all_reduce(param.grad, group=self.group)
            self.reduced[name] = param.grad.clone()
            param.grad /= self.group.size()
        self.optimizer.step()
        return self.said()

    def said(self):
        return StepResult(skipped=False)

    def settle(self):
        pass

    def params(self):
        return dict(self.named)

    def parts(self):
        for name, param in self.named.items():
            flat = None if param.grad is None else self.reduced[name].reshape(-1)
            place = Place(param=name, start=0, stop=param.numel())
            yield OwnedPart(place, flat, param.detach().reshape(-1), {})

    def stray_gradients(self, *, padding_only):
        return ""

    def stray_padding(self):
        return ""

    def notes(self):
        return ["all is well"]

    def unwrap(self):
        self.zero_grad()
        return self.bare


class Target:
    name = "mine"
    capabilities = Capabilities(optimizers=("sgd",), stages=(0,), follows=("model.freeze",))

    def __init__(self, **methods):
        self.engine = type("Mine", (Engine,), methods)

    def build(self, module, *, scenario, group):
        return self.engine(module, scenario, group)


def judge(pool, target, **parts):
    chosen = {"model": ModelSpec(name="params", shapes=((2, 3), (), (0,), (5,)))} | parts
    scenario = Scenario(
        schema=1, name="case", world=WorldSpec(size=2), system=SystemSpec(stage=0),
        optimizer=OptimizerSpec(name="sgd", lr=0.1), run=RunSpec(steps=2), **chosen,
    )  # fmt: skip
    return run_case(scenario, pool=pool, target=target)


def test_correct_engine_passes(pool):
    result = judge(pool, Target())
    assert (result.verdict, result.findings, result.error) == ("pass", (), "")


def always(value):
    return lambda self, *args, **named: value


def changed(**fields):
    """Return a `parts` method that replaces the given fields of each part."""

    def parts(self):
        for part in Engine.parts(self):
            held = {name: getattr(part, name) for name in ("place", "grad", "master", "state")}
            yield OwnedPart(**(held | fields))

    return parts


def placed(**fields):
    def parts(self):
        for part in Engine.parts(self):
            held = {name: getattr(part.place, name) for name in ("param", "start", "stop")}
            yield OwnedPart(Place(**(held | fields)), part.grad, part.master, part.state)

    return parts


def told(change):
    return lambda self: {name: change(param) for name, param in self.named.items()}


def named(change):
    return lambda self: {change(name): param for name, param in self.named.items()}


class Several(nn.Module):
    """Returns its output in a tuple, as some libraries' models do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return (self.inner(*args), "aux")


def wrapped(self, module, scenario, group):
    Engine.__init__(self, module, scenario, group)
    self.module = Several(module)


SPARSE = torch.eye(2).to_sparse()
META = torch.empty(3, device="meta")

WRONG = {
    "step gives a number": ({"step": always(5)}, "`step`", "StepResult or None, got 5 (int)"),
    "step gives text": ({"step": always("ok")}, "`step`", "got 'ok' (str)"),
    "a norm that is a number": ({"said": always(StepResult(norm=1.0))}, "`step`", "a 0-D tensor"),
    "unwrap gives nothing": ({"unwrap": always(None)}, "`unwrap`", "the torch.nn.Module"),
    "a norm in bf16": (
        {"said": always(StepResult(norm=torch.tensor(1.0, dtype=torch.bfloat16)))},
        "`step`", "fp32 or fp64, for norm, got Tensor of shape (), torch.bfloat16",
    ),
    "a norm of two": ({"said": always(StepResult(norm=torch.ones(2)))}, "`step`", "(2,)"),
    "a norm without content": (
        {"said": always(StepResult(norm=torch.empty((), device="meta")))}, "`step`", "meta",
    ),
    "zeros as a number": ({"said": always(StepResult(zeros=1.5))}, "`step`", "integer for zeros"),
    "zeros as a bool": ({"said": always(StepResult(zeros=True))}, "`step`", "integer for zeros"),
    "skipped as a number": ({"said": always(StepResult(skipped=0))}, "`step`", "True or False"),
    "a scale as text": ({"said": always(StepResult(loss_scale="2"))}, "`step`", "loss_scale"),
    "params of None": ({"params": always(None)}, "`params`", "a mapping of names to tensors"),
    "params as a list": ({"params": always([1])}, "`params`", "got [1] (list)"),
    "params by number": ({"params": always({1: torch.ones(1)})}, "`params`", "got 1 (int)"),
    "params as lists": ({"params": told(lambda p: p.tolist())}, "`params`", "for param 'p0'"),
    "params of None each": ({"params": told(lambda p: None)}, "`params`", "got None"),
    "params with a prefix": (
        {"params": named("module.{}".format)}, "`params`", "Try 'p0', without the wrapper's prefix",
    ),
    "params of another name": ({"params": named(str.upper)}, "`params`", "'p0', 'p1', 'p2', 'p3'"),
    "params of another size": (
        {"params": told(lambda p: p.reshape(-1)[:1])}, "`params`", "with 1 elements instead of 6",
    ),
    "sparse params": ({"params": told(lambda p: SPARSE)}, "`params`", "a dense tensor for"),
    "params on meta": ({"params": told(lambda p: p.to("meta"))}, "`params`", "'p0' on cpu"),
    "parts of None": ({"parts": always(None)}, "`parts`", "an iterable of"),
    "parts as numbers": ({"parts": always([5])}, "`parts`", "OwnedPart for each part, got 5"),
    "a part without place": ({"parts": changed(place=None)}, "`parts`", "zero_sim.targets.Place"),
    "a place of an index": ({"parts": placed(param=0)}, "`parts`", "for Place.param, got 0"),
    "a place of no param": ({"parts": placed(param="x")}, "`parts`", "got 'x'"),
    "a place with a prefix": ({"parts": placed(param="m.p3")}, "`parts`", "Try 'p3'"),
    "a negative start": ({"parts": placed(start=-1)}, "`parts`", "got (-1, 6)"),
    "a stop before start": ({"parts": placed(start=9)}, "`parts`", "got (9, 6)"),
    "a stop as a float": ({"parts": placed(stop=6.0)}, "`parts`", "got (0, 6.0)"),
    "a stop of None": ({"parts": placed(stop=None)}, "`parts`", "got (0, None)"),
    "a master of None": ({"parts": changed(master=None)}, "`parts`", "a tensor as the master"),
    "a master on meta": ({"parts": changed(master=META)}, "`parts`", "on cpu"),
    "a gradient as a list": ({"parts": changed(grad=[1.0])}, "`parts`", "a tensor as the grad"),
    "state of None": ({"parts": changed(state=None)}, "`parts`", "a mapping of torch's keys"),
    "state of numbers": ({"parts": changed(state={"step": 1})}, "`parts`", "state 'step'"),
    "stray of None": ({"stray_gradients": always(None)}, "`stray_gradients`", "got None"),
    "stray as a bool": ({"stray_gradients": always(False)}, "`stray_gradients`", "got False"),
    "padding of None": ({"stray_padding": always(None)}, "`stray_padding`", "got None"),
    "notes of None": ({"notes": always(None)}, "`notes`", "an iterable of text"),
    "notes as text": ({"notes": always("well")}, "`notes`", "got 'well'"),
    "notes of numbers": ({"notes": always([1])}, "`notes`", "got [1]"),
    "no module": ({"module": property(lambda self: 5, lambda self, to: None)}, "`module`", "got 5"),
    "a module with a tuple": ({"__init__": wrapped}, "`module`", "the bare model's output"),
    "step without its argument": ({"step": lambda self: None}, "step(*, lr_factor)", "got step()"),
    "backward of a loss": ({"backward": lambda self, loss: None}, "backward(loss, *,", "got back"),
    "params that want more": ({"params": lambda self, rank: {}}, "to have params()", "(rank)"),
    "a list of parts": ({"parts": []}, "`parts`", "to be a method, parts(), got [] (list)"),
    "costs of None": (
        {"held_bytes": always(None), "overlap": always({})}, "`held_bytes`", "names to numbers",
    ),
    "costs in text": (
        {"held_bytes": always({"state": "8"}), "overlap": always({})}, "`held_bytes`", "'state'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_return_value_is_an_error_that_names_the_method(pool, wrong):
    methods, method, words = WRONG[wrong]
    result = judge(pool, Target(**methods))
    assert (result.verdict, result.findings) == ("error", ()), result
    assert method in result.error
    assert words in result.error
    assert "Mine" in result.error
    assert "\n" not in result.error
    assert "judge" not in result.error


RAISING = [
    "zero_grad", "start_micro_batch", "backward", "step", "settle", "params", "parts",
    "stray_gradients", "stray_padding", "notes", "unwrap",
]  # fmt: skip


def fails(self, *args, **named):
    raise RuntimeError("out of luck")


@pytest.mark.parametrize("name", RAISING)
def test_exception_in_an_engine_is_a_finding_of_its_rank(pool, name):
    result = judge(pool, Target(**{name: fails}))
    assert result.verdict == "fail"
    assert result.findings[0].check == "world.rank-failed"
    assert "RuntimeError: out of luck" in result.findings[0].message


def test_parts_that_fail_before_gradients_get_a_remedy(pool):
    def parts(self):
        for name, param in self.named.items():
            place = Place(param=name, start=0, stop=param.numel())
            yield OwnedPart(place, param.grad.reshape(-1), param.detach().reshape(-1), {})

    result = judge(pool, Target(parts=parts))
    assert result.verdict == "error"
    assert "before the first step" in result.error
    assert "OwnedPart(grad=None)" in result.error


def test_shapes_with_the_same_elements_are_accepted(pool):
    def parts(self):
        for part in Engine.parts(self):
            shape = self.named[part.place.param].shape
            grad = None if part.grad is None else part.grad.view(shape)
            yield OwnedPart(part.place, grad, part.master.view(shape), part.state)

    flat = told(lambda param: param.detach().reshape(-1))
    said = always(StepResult(skipped=False, zeros=None))
    result = judge(pool, Target(parts=parts, params=flat, said=said))
    assert (result.verdict, result.findings, result.error) == ("pass", (), "")


def test_invalid_return_value_after_a_finding_keeps_the_finding(pool):
    def said(self):
        self.named["p3"].data += 1
        self.steps = getattr(self, "steps", 0) + 1
        return None

    def notes(self):
        return 5

    result = judge(pool, Target(said=said, notes=notes))
    assert result.verdict == "fail"
    assert result.findings[0].check == "equality.master"
    assert any("`notes`" in note for note in result.notes)


@pytest.mark.parametrize("value", [None, 5, "engine"])
def test_object_that_is_no_engine_is_refused(pool, value):
    target = Target()
    target.build = lambda module, *, scenario, group: value
    result = judge(pool, target)
    assert result.verdict == "error"
    assert f"got {type(value).__name__} without module, zero_grad" in result.error


class Wrapper(nn.Module):
    """Prefixes the names of params, as most wrappers do."""

    def __init__(self, inner):
        super().__init__()
        self.module = inner

    def forward(self, *args, **named):
        return self.module(*args, **named)


class Frozen(Engine):
    """Does not step params without requires_grad."""

    def __init__(self, module, scenario, group):
        super().__init__(module, scenario, group)
        self.module = Wrapper(module)

    def step(self, *, lr_factor):
        self.reduced = {name: torch.zeros_like(param) for name, param in self.named.items()}
        for name, param in self.named.items():
            if param.requires_grad:
                dist.all_reduce(param.grad, group=self.group)
                self.reduced[name] = param.grad.clone()
                param.grad /= self.group.size()
        self.optimizer.step()

    def parts(self):
        for name, param in self.named.items():
            place = Place(param=name, start=0, stop=param.numel())
            told = self.reduced[name].reshape(-1) if hasattr(self, "reduced") else None
            yield OwnedPart(place, told, param.detach().reshape(-1), {})


class TestFreeze:
    """model.freeze names params of the bare model, under any wrapper."""

    model = ModelSpec(
        name="params",
        shapes=((2, 3), (4,), (11,)),
        freeze=(FreezeSpec(param="p1", start=0, stop=1),),
    )

    @pytest.fixture
    def target(self):
        target = Target()
        target.engine = Frozen
        return target

    def test_params_under_a_wrapper_are_found(self, pool, target):
        result = judge(pool, target, model=self.model)
        assert (result.verdict, result.findings, result.error) == ("pass", (), "")

    def test_param_not_found_is_an_error(self, pool, target):
        class Lost(Frozen):
            def __init__(self, module, scenario, group):
                super().__init__(module, scenario, group)
                self.module = Wrapper(nn.Linear(2, 2))

        target.engine = Lost
        result = judge(pool, target, model=self.model)
        assert result.verdict == "error"
        assert "to have param 'p1', because model.freeze names" in result.error

    def test_ambiguous_name_is_an_error(self, pool, target):
        class Double(Frozen):
            def __init__(self, module, scenario, group):
                super().__init__(module, scenario, group)
                self.module.other = nn.ParameterDict({"p1": nn.Parameter(torch.ones(4))})

        target.engine = Double
        result = judge(pool, target, model=self.model)
        assert "got 'module.p1', 'other.p1'" in result.error


def test_engine_without_a_model_is_checked_for_types_only():
    engine = type("Bare", (Engine,), {"__init__": lambda self: None})()
    engine.module, engine.named = nn.Linear(1, 1), {"anything": torch.ones(2)}
    assert list(complete(engine).params()) == ["anything"]
    engine.named = {"anything": 5}
    with pytest.raises(ProtocolError, match="a tensor for param 'anything'"):
        complete(engine).params()


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"lr": 0.1}, "`settings` of Bare to return zero_sim.targets.Settings"),
        (Settings(params={"w": 0.1}), "a mapping from params to mappings"),
        (Settings(params={}, loss_scale="8"), "a number for loss_scale, or None"),
        (Settings(params={}, good_steps=True), "a number for good_steps, or None"),
    ],
)
def test_invalid_settings_are_an_error(told, words):
    engine = type("Bare", (Engine,), {"__init__": lambda self: None})()
    engine.module = nn.Linear(1, 1)
    engine.settings = lambda: told
    with pytest.raises(ProtocolError, match=words):
        complete(engine).settings()
