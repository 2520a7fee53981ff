"""Arrivals of gradients and starts of modules, in the time of the log."""

import torch
from torch import nn

from zero_sim.cost.hook_trace import readers_of, record_hooks
from zero_sim.targets import StepResult


def names_of(module):
    return {param: name for name, param in module.named_parameters()}


def readers(module):
    found = readers_of(module, names=names_of(module))
    return {type(reader).__name__: set(names) for reader, names in found.items()}


def test_closest_module_with_a_forward_reads_a_param():
    assert readers(nn.Sequential(nn.Linear(1, 1))) == {"Linear": {"0.weight", "0.bias"}}


def test_containers_without_a_forward_are_skipped():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterList([torch.ones(1)])

        def forward(self, x):
            return x * self.scales[0]

    assert readers(Model()) == {"Model": {"scales.0"}}
    assert readers(nn.ParameterList([torch.ones(1)])) == {"NoneType": {"0"}}


def test_attention_reads_its_output_projection():
    found = readers(nn.MultiheadAttention(2, 1, bias=False))
    assert found["MultiheadAttention"] == {"in_proj_weight", "out_proj.weight"}


def test_tied_param_has_all_its_readers():
    first, second = nn.Linear(1, 1, bias=False), nn.Bilinear(1, 1, 1, bias=False)
    second.weight = first.weight
    assert readers(nn.Sequential(first, second)) == {
        "Linear": {"0.weight"},
        "Bilinear": {"0.weight"},
    }


def test_gradients_and_modules_are_recorded_in_order():
    time = iter(range(100))
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    hook_trace = record_hooks(module, names=names_of(module), clock=lambda: next(time))
    hook_trace.before_micro_batch(0, 0)
    module(module(torch.ones(1))).sum().backward()
    hook_trace.after_step(0, [], StepResult())
    assert [(set(s.names), s.time) for s in hook_trace.begins[0]] == [
        ({"0.weight"}, 1),
        ({"1.weight"}, 2),
    ]
    assert [(set(s.names), s.time) for s in hook_trace.arrivals[0, 0]] == [
        ({"1.weight"}, 3),
        ({"0.weight"}, 4),
    ]
    assert (hook_trace.starts, hook_trace.ends) == ({(0, 0): 0}, {0: 5})


def test_calls_outside_training_are_not_recorded():
    module = nn.Linear(1, 1)
    hook_trace = record_hooks(module, names=names_of(module), clock=lambda: 0)
    hook_trace.before_micro_batch(0, 0)
    hook_trace.after_step(0, [], StepResult())
    module(torch.ones(1)).sum().backward()
    assert not hook_trace.begins
    assert not hook_trace.arrivals


def test_modules_are_recorded_only_in_the_first_micro_batch():
    module = nn.Linear(1, 1)
    hook_trace = record_hooks(module, names=names_of(module), clock=lambda: 0)
    hook_trace.before_micro_batch(3, 1)
    module(torch.ones(1))
    assert not hook_trace.begins
