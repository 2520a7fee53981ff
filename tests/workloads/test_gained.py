"""Modules with a buffer as a factor of their forward."""

import pytest
import torch

from zero_sim.scenario.applies import USED_BY
from zero_sim.workloads import build_workload

NAMES = USED_BY["model.buffer"]


@pytest.fixture(params=NAMES)
def pair(request, make_scenario):
    """Return the workloads of a case without a buffer and with a saved buffer."""
    return [
        build_workload(make_scenario(request.param, shapes=((3,), (2, 2)), buffer=buffer))
        for buffer in ("none", "saved")
    ]


def outputs_of(workload):
    """Return the module and its output in a loss."""
    outputs = []
    module = workload.build()
    module.register_forward_hook(lambda *call: outputs.append(call[-1]))
    workload.loss(module, workload.batch(step=0, rank=0, micro=0))
    return module, outputs[0]


def test_outputs_are_multiplied(pair):
    (_, plain), (module, gained) = map(outputs_of, pair)
    assert torch.equal(plain * module.gain, gained)
    assert module.gain != 1


def test_params_are_the_same(pair):
    plain, gained = (dict(each.build().named_parameters()) for each in pair)
    assert list(plain) == list(gained)
    assert all(torch.equal(value, gained[name]) for name, value in plain.items())


@pytest.mark.parametrize(("buffer", "is_saved"), [("saved", True), ("rebuilt", False)])
def test_only_a_saved_buffer_is_in_checkpoints(make_scenario, buffer, is_saved):
    module = build_workload(make_scenario("mlp", buffer=buffer)).build()
    assert ("gain" in module.state_dict()) == is_saved


def test_each_module_has_its_own_buffer(make_scenario):
    workload = build_workload(make_scenario("mlp", buffer="saved"))
    one, two = workload.build(), workload.build()
    one.gain.fill_(0)
    assert two.gain != 0
