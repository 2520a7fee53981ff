"""The bare model: params found under wrappers; frozen params, observed only if comparable."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from zero_sim.targets.bare_model import look_at, names_like, untrained_of


@pytest.fixture
def module():
    one = nn.Linear(3, 2)
    one.weight.requires_grad_(False)
    return one


def known_of(module):
    return untrained_of(dict(module.named_parameters()))


def seen(module, known, *, reported=None):
    """Observation of the weight, the only frozen param."""
    reported = {} if reported is None else reported
    (only,) = look_at(known, reported=reported, held=dict(module.named_parameters()))
    assert only.name == "weight"
    return only


def test_trained_params_are_not_recorded(module):
    assert known_of(module).keys() == {"weight"}


def test_change_in_place_is_observed(module):
    known = known_of(module)
    with torch.no_grad():
        module.weight[1, 2] += 1
    only = seen(module, known)
    assert (only.now - only.values).nonzero().tolist() == [[1, 2]]


def test_param_under_a_wrapper_is_observed(module):
    known = known_of(module)
    assert seen(nn.Sequential(module), known).now is not None


def test_replaced_param_is_not_observed(module):
    known = known_of(module)
    module.weight.data = module.weight.detach() * 3
    assert seen(module, known).now is None


def test_replaced_param_is_observed_if_reported_params_are_the_modules(module):
    known = known_of(module)
    module.weight.data = module.weight.detach() * 3
    only = seen(module, known, reported={"bias": module.bias.detach()})
    assert torch.equal(only.now, only.values * 3)


def test_reported_copies_do_not_prove_that_a_param_was_replaced(module):
    known = known_of(module)
    module.weight.data = module.weight.detach() * 3
    assert seen(module, known, reported={"bias": module.bias.detach().clone()}).now is None


def test_reported_values_are_observed(module):
    known = known_of(module)
    module.weight.data = torch.zeros(1)
    whole = known["weight"].values.reshape(-1) + 1
    assert torch.equal(seen(module, known, reported={"weight": whole}).now, whole.reshape(2, 3))


def freed(weight):
    weight.untyped_storage().resize_(0)
    return weight


PARTIAL = {
    "a part": lambda weight: weight[:1],
    "freed memory": freed,
    "another device": lambda weight: weight.to("meta"),
    "a rounding dtype": lambda weight: weight.bfloat16(),
    "another layout": lambda weight: weight.to_sparse(),
}


@pytest.mark.parametrize("what", PARTIAL)
def test_incomparable_tensor_is_not_observed(module, what):
    known = known_of(module)
    other = PARTIAL[what](module.weight.detach().clone())
    assert seen(module, known, reported={"weight": other}).now is None


def test_freed_memory_is_not_read(module):
    known = known_of(module)
    freed(module.weight.detach())
    assert seen(module, known).now is None


def test_wider_dtype_is_compared_after_the_cast():
    module = nn.Linear(3, 2, dtype=torch.bfloat16)
    known = known_of(module.requires_grad_(False))
    only = next(iter(look_at(known, reported={"weight": module.weight.float()}, held={})))
    assert only.values.dtype == torch.float32
    assert torch.equal(only.now, only.values)


def wrap_by_fsdp1(module):
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


@pytest.mark.parametrize("wrap", [wrap_by_fsdp1, fully_shard])
def test_torch_shards_are_not_observed(run_ranks, wrap):
    def program(rank):
        module = nn.Linear(3, 2)
        module.weight.requires_grad_(False)
        known = known_of(module)
        wrapped = wrap(module)
        before = seen(wrapped, known).now
        wrapped(torch.ones(1, 3)).sum().backward()
        return before, seen(wrapped, known).now

    results, _ = run_ranks(2, program)
    assert results == [(None, None)] * 2


@pytest.mark.parametrize(
    ("own", "name", "found"),
    [
        # Wrappers may add components in front and within.
        (["up.weight", "up.bias"], "up.weight", ["up.weight"]),
        (["module.up.weight", "up.bias"], "up.weight", ["module.up.weight"]),
        (["up._wrapped.weight", "up.bias"], "up.weight", ["up._wrapped.weight"]),
        (["a.up.b.weight", "up.bias"], "up.weight", ["a.up.b.weight"]),
        # An exact name wins; otherwise all candidates are returned.
        (["weight", "head.weight"], "weight", ["weight"]),
        (["a.weight", "b.weight"], "weight", ["a.weight", "b.weight"]),
        # A missing component or another ending means another param.
        (["weight.up"], "up.weight", []),
        (["up.weight.scale"], "up.weight", []),
        (["weight"], "up.weight", []),
    ],
)
def test_param_names_match_under_wrappers(own, name, found):
    assert names_like(own, name) == found
