"""State per element of each optimizer, equal to torch's."""

from typing import get_args

import pytest
import torch

from zero_sim.calculators.state import check_name, state_names
from zero_sim.errors import UsageError
from zero_sim.scenario.spec import OptimizerName, OptimizerSpec
from zero_sim.targets.torch.optim import class_of, settings_of

SPECS = [
    *(OptimizerSpec(name=name) for name in get_args(OptimizerName) if name != "own"),
    OptimizerSpec(name="adam", amsgrad=True),
    OptimizerSpec(name="adamw", amsgrad=True),
    OptimizerSpec(name="sgd", momentum=0.9),
    OptimizerSpec(name="rmsprop", momentum=0.9),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.name}{s.amsgrad:d}{s.momentum > 0:d}")
def test_state_names_equal_those_of_torch(spec):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = class_of(spec)([param], **settings_of(spec))
    param.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state[param]
    kept = {key for key, value in state.items() if torch.is_tensor(value) and value.dim()}
    assert set(state_names(spec)) == kept


def test_unknown_name_is_refused():
    assert check_name("AdamW") == "adamw"
    with pytest.raises(UsageError, match="one of adamw, adam"):
        check_name("lion")
