"""A gradient that belongs to another param is named in the finding."""

from dataclasses import replace

from tests.judge.pointing import WrongAnswers, first_finding
from zero_sim.scenario.spec import ModelSpec, RunSpec, SystemSpec, WorldSpec

CASE = {
    "model": ModelSpec(name="params", shapes=((5,), (5,))),
    "world": WorldSpec(size=2),
    "run": RunSpec(steps=1),
    "system": SystemSpec(stage=0),
}


def exchange(engine, right):
    """Report each param's gradient as the other's; masters and state are unchanged."""
    parts = list(right())
    grads = [part.grad for part in reversed(parts)]
    return [replace(part, grad=grad) for part, grad in zip(parts, grads, strict=True)]


def test_true_param_of_the_gradient_is_named(judged):
    found = first_finding(judged(WrongAnswers(parts=exchange), **CASE), "equality.grad")
    other = {"0": "1", "1": "0"}[found.param[-1]]
    assert f"the expected value of param '{found.param[:-1]}{other}'" in str(found.as_dict())
