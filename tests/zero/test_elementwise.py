"""Shard-invariant optimizers, and the refusal of all others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.configs import zero_config
from zero_sim.errors import UsageError
from zero_sim.zero import DistributedDataParallel, DistributedOptimizer, ZeroConfig
from zero_sim.zero.refusals import ELEMENTWISE

WORLD_SIZE, STEPS = 3, 6
FROZEN, FROZEN_STEPS = 5, (2, 3)
OTHER_PROGRAM_WITH_FOREACH = {torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam}
SHAPES = [(37,), (1,), (5, 13), (), (0,), (129,), (64,), (2, 3, 7)]
SETTINGS = [
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {"weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.3}),
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (torch.optim.RMSprop, {"weight_decay": 0.1}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (torch.optim.Adagrad, {"weight_decay": 0.1, "lr_decay": 0.1}),
    (torch.optim.NAdam, {"weight_decay": 0.1}),
    (torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (torch.optim.RAdam, {"weight_decay": 0.1}),
    (torch.optim.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (torch.optim.Adamax, {"weight_decay": 0.1}),
    (torch.optim.Adadelta, {"weight_decay": 0.1}),
    (torch.optim.ASGD, {"weight_decay": 0.1, "t0": 2.0}),
    (torch.optim.Rprop, {}),
]


def name_setting(setting):
    """Name a setting by class and options, for the test's id."""
    cls, options = setting
    return "-".join([cls.__name__, *(f"{key}={value}" for key, value in options.items())])


def draw(seed, *, scale=1.0):
    """Draw a tensor for each shape; a tenth of all elements are zero."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) * scale for shape in SHAPES]
    return [value * (torch.rand(value.shape, generator=generator) > 0.1) for value in values]


def build_module():
    """Build a module with the same initial bits on every call."""
    return nn.ParameterList([nn.Parameter(value) for value in draw(7)])


def draw_local_grads(*, step, rank):
    """Draw gradients over many orders of magnitude."""
    return draw(100 * step + rank, scale=10.0 ** (3 - 2 * step))


def make_factory(cls, options, **more):
    """Return a factory with a learning rate that moves every optimizer's params."""
    return lambda params: cls(params, lr=0.01, **options, **more)


def run_sharded(optim_factory):
    """Train on one rank; return its final params and owned fragments."""
    module = build_module()
    ddp = DistributedDataParallel(module, config=zero_config(divide="none"), group=dist.group.WORLD)
    optimizer = DistributedOptimizer(ddp, optim_factory=optim_factory)
    for step in range(STEPS):
        grads = draw_local_grads(step=step, rank=ddp.rank)
        module[FROZEN].requires_grad_(step not in FROZEN_STEPS)
        sum((p * g).sum() for p, g in zip(module, grads, strict=True)).backward()
        ddp.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()
    params = {name: param.detach().clone() for name, param in ddp.params.items()}
    owned = [
        (f.param, f.in_param, {"master": f.master.clone(), **f.state})
        for f in optimizer.fragments()
    ]
    return params, owned


def run_plainly(optim_factory):
    """Train unsharded params on one device; return values and state by param."""
    module = build_module()
    optimizer = optim_factory(list(module))
    for step in range(STEPS):
        for rank in range(WORLD_SIZE):
            for param, grad in zip(module, draw_local_grads(step=step, rank=rank), strict=True):
                param.grad = grad if rank == 0 else param.grad + grad
        if step in FROZEN_STEPS:
            module[FROZEN].grad = None
        optimizer.step()
    return {
        name: {"master": param.detach(), **optimizer.state[param]}
        for name, param in module.named_parameters()
    }


def bits(tensor):
    """Return bits as integers, so zeros keep their signs and there is no tolerance."""
    return tensor.contiguous().view(torch.int32).tolist()


class TestShardInvariance:
    """Known optimizers give fragments the same bits as unsharded params."""

    def test_all_known_classes_are_tested(self):
        """Each known class needs an entry in SETTINGS."""
        assert {cls for cls, _ in SETTINGS} == ELEMENTWISE

    @pytest.mark.parametrize("foreach", [False, True])
    @pytest.mark.parametrize("setting", SETTINGS, ids=name_setting)
    def test_params_and_state_equal_one_device(self, run_ranks, setting, foreach):
        """Three ranks against one device; one param is frozen for two steps."""
        cls, options = setting
        optim_factory = make_factory(cls, options, foreach=foreach)
        expected = run_plainly(optim_factory)
        results, _ = run_ranks(WORLD_SIZE, lambda rank: run_sharded(optim_factory))
        owned_elems = 0
        for params, owned in results:
            for name, param in params.items():
                assert bits(param) == bits(expected[name]["master"]), name
            for name, span, values in owned:
                owned_elems += span.numel
                assert values.keys() == expected[name].keys()
                for key, value in values.items():
                    whole = expected[name][key]
                    is_shared = value.dim() == 0
                    part = whole if is_shared else whole.reshape(-1)[span.start : span.stop]
                    assert bits(value) == bits(part), (name, key)
        assert owned_elems == sum(value["master"].numel() for value in expected.values())

    @pytest.mark.parametrize("setting", SETTINGS, ids=name_setting)
    def test_foreach_changes_bits_for_three_classes(self, setting):
        """foreach differs from the for-loop for three classes, even on unsharded params."""
        cls, options = setting
        loop, foreach = (
            run_plainly(make_factory(cls, options, foreach=foreach)) for foreach in (False, True)
        )
        equal = all(
            bits(value) == bits(foreach[name][key])
            for name, values in loop.items()
            for key, value in values.items()
        )
        assert equal == (cls not in OTHER_PROGRAM_WITH_FOREACH)

    @pytest.mark.parametrize("foreach", [False, True])
    @pytest.mark.parametrize("cls", sorted(ELEMENTWISE, key=lambda cls: cls.__name__))
    def test_rank_without_elements_steps_an_empty_group(self, run_ranks, cls, foreach):

        def program(rank):
            module = nn.ParameterList([nn.Parameter(torch.ones(1))])
            ddp = DistributedDataParallel(module, config=ZeroConfig(), group=dist.group.WORLD)
            optimizer = DistributedOptimizer(
                ddp, optim_factory=make_factory(cls, {}, foreach=foreach)
            )
            (module[0] * 3).sum().backward()
            ddp.finish_grad_sync()
            optimizer.step()
            return module[0].item(), len(optimizer.inner.state)

        results, _ = run_ranks(2, program)
        assert results[0][0] == results[1][0] != 1
        assert results[1][1] == 0


class Halved(torch.optim.Optimizer):
    """An optimizer outside torch.optim that halves params."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(0.5)
                self.state[param]["seen"] = self.make_state(param)

    def make_state(self, param):
        """Return state with a value for each element."""
        return torch.ones_like(param)


class Bf16State(Halved):
    """An optimizer that keeps its state in bf16."""

    def make_state(self, param):
        return torch.ones_like(param, dtype=torch.bfloat16)


class RowState(Halved):
    """An optimizer with state that is not per element, like factored optimizers."""

    def make_state(self, param):
        return torch.ones(1)


class MyAdafactor(torch.optim.Adafactor):
    """A subclass of an optimizer that is not elementwise."""


def build(*, optim_factory, group, **options):
    """Wrap two params of 3 and 4 elements."""
    module = nn.ParameterList([nn.Parameter(torch.ones(n)) for n in (3, 4)])
    ddp = DistributedDataParallel(module, config=ZeroConfig(), group=group)
    return ddp, DistributedOptimizer(ddp, optim_factory=optim_factory, **options)


class TestRefused:
    """Optimizers whose result would depend on shards."""

    def test_fused(self, run_ranks):
        """All ranks refuse it, even one that owns nothing."""

        def program(rank):
            with pytest.raises(UsageError, match=r"fused=False.*round.*foreach=True"):
                build(
                    group=dist.group.WORLD,
                    optim_factory=lambda params: torch.optim.AdamW(params, fused=True),
                )

        run_ranks(9, program)

    @pytest.mark.parametrize(
        "cls", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.SparseAdam, MyAdafactor]
    )
    def test_not_elementwise(self, lone_group, cls):
        """An update that reads other elements cannot be sharded; no declaration helps."""
        with pytest.raises(UsageError, match=f"elementwise.*{cls.__name__}"):
            build(group=lone_group, optim_factory=cls, elementwise=True)

    def test_unknown_classes(self, lone_group):
        """The message shows how to declare an elementwise class."""
        with pytest.raises(UsageError, match=r"AdamW.*got Halved.*elementwise=True"):
            build(group=lone_group, optim_factory=Halved)

    @pytest.mark.parametrize(
        ("cls", "reason"),
        [(Bf16State, r"'seen' of torch\.bfloat16.*not shard-inv"), (RowState, r"shape \(1,\)")],
    )
    def test_state_that_depends_on_shards(self, lone_group, cls, reason):
        """The check runs after the first step, when state exists."""
        ddp, optimizer = build(group=lone_group, optim_factory=cls, elementwise=True)
        ddp.finish_grad_sync()
        with pytest.raises(UsageError, match=reason):
            optimizer.step()

    def test_a_factory_that_casts(self, lone_group):
        """The optimizer would step copies."""
        with pytest.raises(UsageError, match="without a cast"):
            build(
                group=lone_group,
                optim_factory=lambda params: torch.optim.SGD([p.bfloat16() for p in params]),
            )

    def test_a_factory_that_makes_its_own_groups(self, lone_group):
        """The factory receives fragments, which are all 1D, so it cannot group by shape."""
        with pytest.raises(UsageError, match=r"1 param groups.*got 2.*group_of"):
            build(
                group=lone_group,
                optim_factory=lambda params: torch.optim.SGD([{"params": [p]} for p in params]),
            )


def test_declared_elementwise_class_is_stepped(run_ranks):

    def program(rank):
        ddp, optimizer = build(group=dist.group.WORLD, optim_factory=Halved, elementwise=True)
        ddp.finish_grad_sync()
        optimizer.step()
        return [param.tolist() for param in ddp.params.values()]

    results, _ = run_ranks(2, program)
    assert results == [[[0.5] * 3, [0.5] * 4]] * 2
