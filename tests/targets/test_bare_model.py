"""The bare model: params by name behind wrappers; untrained ones, seen only where that is right."""

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


def seen(module, known, *, told=None):
    """What is there of the weight, the only param that is never trained."""
    told = {} if told is None else told
    (only,) = look_at(known, told=told, held=dict(module.named_parameters()))
    assert only.name == "weight"
    return only


def test_what_is_trained_is_not_noted(module):
    assert known_of(module).keys() == {"weight"}


def test_a_change_in_its_own_memory_is_shown(module):
    known = known_of(module)
    with torch.no_grad():
        module.weight[1, 2] += 1
    only = seen(module, known)
    assert (only.now - only.values).nonzero().tolist() == [[1, 2]]


def test_a_wrapper_may_stand_around_it(module):
    known = known_of(module)
    assert seen(nn.Sequential(module), known).now is not None


def test_what_is_put_in_its_place_is_nobody_elses_affair(module):
    known = known_of(module)
    module.weight.data = module.weight.detach() * 3
    assert seen(module, known).now is None


def test_what_is_put_in_its_place_is_shown_where_told_params_are_the_modules(module):
    known = known_of(module)
    module.weight.data = module.weight.detach() * 3
    only = seen(module, known, told={"bias": module.bias.detach()})
    assert torch.equal(only.now, only.values * 3)


def test_told_copies_say_nothing_of_what_the_module_has(module):
    known = known_of(module)
    module.weight.data = module.weight.detach() * 3
    assert seen(module, known, told={"bias": module.bias.detach().clone()}).now is None


def test_what_the_engine_tells_is_taken_at_its_word(module):
    known = known_of(module)
    module.weight.data = torch.zeros(1)
    whole = known["weight"].values.reshape(-1) + 1
    assert torch.equal(seen(module, known, told={"weight": whole}).now, whole.reshape(2, 3))


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
def test_what_cannot_be_compared_is_not_shown(module, what):
    known = known_of(module)
    other = PARTIAL[what](module.weight.detach().clone())
    assert seen(module, known, told={"weight": other}).now is None


def test_memory_of_its_own_that_was_freed_is_not_read(module):
    known = known_of(module)
    freed(module.weight.detach())
    assert seen(module, known).now is None


def test_a_wider_dtype_is_compared_after_the_cast():
    module = nn.Linear(3, 2, dtype=torch.bfloat16)
    known = known_of(module.requires_grad_(False))
    only = next(iter(look_at(known, told={"weight": module.weight.float()}, held={})))
    assert only.values.dtype == torch.float32
    assert torch.equal(only.now, only.values)


def wrap_by_fsdp1(module):
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


@pytest.mark.parametrize("wrap", [wrap_by_fsdp1, fully_shard])
def test_shards_of_torch_are_not_shown(run_ranks, wrap):
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
        # Parts may be added in front and within.
        (["up.weight", "up.bias"], "up.weight", ["up.weight"]),
        (["module.up.weight", "up.bias"], "up.weight", ["module.up.weight"]),
        (["up._wrapped.weight", "up.bias"], "up.weight", ["up._wrapped.weight"]),
        (["a.up.b.weight", "up.bias"], "up.weight", ["a.up.b.weight"]),
        # A name that is there is the only one; otherwise all that may be meant are given.
        (["weight", "head.weight"], "weight", ["weight"]),
        (["a.weight", "b.weight"], "weight", ["a.weight", "b.weight"]),
        # What lacks a part, or ends otherwise, is another param.
        (["weight.up"], "up.weight", []),
        (["up.weight.scale"], "up.weight", []),
        (["weight"], "up.weight", []),
    ],
)
def test_params_of_a_name(own, name, found):
    assert names_like(own, name) == found
