"""Messages for targets whose declarations exclude every case."""

import pytest

from zero_sim.errors import Problem
from zero_sim.fuzz import drawing
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.excluded import why_none_fits
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.targets import Capabilities, Numerics


class Target:
    """A target that is never built."""

    name = "theirs"

    def __init__(self, **declared):
        vars(self).update(declared)

    def build(self, module, *, scenario, group):
        raise AssertionError


def refuse_all(scenario):
    yield Problem(path="model.name", message="expected another day.")


STRICT = Capabilities(only=(("world.strict", (False,)),))
UNKNOWN = Capabilities(only=(("world.order_known", (False,)),))
CASES = [
    ({"capabilities": STRICT}, "Capabilities.only = (('world.strict', (False,)),) excludes all of"),
    ({"capabilities": STRICT}, "100 of them for world.strict: this target supports false"),
    ({"refuses": refuse_all}, "`refuses` excludes all of 100 drawn cases, 100 of them for model.n"),
    (
        {"capabilities": UNKNOWN, "numerics": Numerics(sync="every", divide_each="round")},
        "Capabilities.only = (('world.order_known', (False,)),) and `numerics` together exclude",
    ),
    ({"capabilities": Capabilities(models=())}, "Capabilities.models is empty. Add at least one"),
    ({"capabilities": Capabilities(orders=())}, "Capabilities.orders is empty"),
    ({"capabilities": Capabilities(models=("tp-block",))}, "none of its declared models can"),
]


@pytest.mark.parametrize(("declared", "said"), CASES)
def test_declaration_that_excludes_all_cases_is_named(declared, said):
    why = why_none_fits(Target(**declared))
    assert why.startswith("no case fits target 'theirs': ")
    assert said in why


def test_common_option_that_excludes_all_cases_is_named():
    """The target has no such option, so every case with it is refused."""
    why = why_none_fits(Target(), options={"depth": "3"})
    assert "--option depth=3 excludes all of 100 drawn cases" in why


@pytest.mark.parametrize("name", ["models", "dtypes", "stages", "optimizers", "orders"])
def test_empty_capability_draws_no_case(name, monkeypatch):
    monkeypatch.setattr(drawing, "_FRUITLESS_DRAWS_MAX", 100)
    target = Target(capabilities=Capabilities(**{name: ()}))
    assert list(draws(drawn_cases(target), seed="0")) == []
