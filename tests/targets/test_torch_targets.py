"""torch's own optimizers equal the reference bit for bit; their mutants are found."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_sim import run_case
from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    OptionSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.sim import World
from zero_sim.targets import find_target, refusals
from zero_sim.targets.torch.ddp import DDPEngine, TorchDDP, ZeroRedundancyEngine
from zero_sim.targets.torch.fsdp2 import FSDP2Engine, TorchFSDP2
from zero_sim.testing import NotConformant, conformance

# Options that are drawn together cause these warnings.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Grad strides do not match:UserWarning"),
    pytest.mark.filterwarnings("ignore:You passed find_unused_parameters=true:UserWarning"),
    # A rank whose shards are all empty has no gradients.
    pytest.mark.filterwarnings("ignore:Called FSDP.clip_grad_norm_:UserWarning"),
]

NAMES = ["torch-ddp", "torch-zero-redundancy", "torch-fsdp1", "torch-fsdp2"]


@pytest.mark.parametrize("name", NAMES)
def test_torch_target_equals_the_reference(name):
    conformance(name, cases=15)()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_reported_as_before_an_in_place_update(name):
    """torch's foreach SGD adds Nesterov's momentum in place to the gradients."""
    stage = find_target(name).capabilities.stages[0]
    scenario = Scenario(
        schema=1, model=ModelSpec(name="params", shapes=((6,),)), world=WorldSpec(size=2),
        system=SystemSpec(stage=stage), run=RunSpec(steps=2),
        optimizer=OptimizerSpec(name="sgd", momentum=0.9, nesterov=True, foreach=True),
    )  # fmt: skip
    result = run_case(scenario, target=find_target(name))
    assert (result.verdict, result.findings) == ("pass", ())


def test_fsdp1_norm_omits_params_without_elements():
    """Unsharded, FSDP1 makes no gradients for them, so it stacks two norms and not four."""
    scenario = Scenario(
        schema=1, model=ModelSpec(name="params", shapes=((0,), (1,), (1,), (0,))),
        world=WorldSpec(size=1), system=SystemSpec(stage=0),
        optimizer=OptimizerSpec(clip_norm=0.001), run=RunSpec(steps=1, seed=6),
    )  # fmt: skip
    result = run_case(scenario, target=find_target("torch-fsdp1"))
    assert (result.verdict, result.findings) == ("pass", ())


def test_another_division_rule_is_found():
    target = TorchDDP()
    declared = target.numerics
    target.numerics = lambda scenario: replace(
        declared(scenario), divide="post", reported_grads="after-division"
    )
    with pytest.raises(NotConformant) as failed:
        conformance(target, cases=60, shrink_seconds=3600)()
    # For powers of two, the reciprocal is exact.
    assert failed.value.scenario.world.size in (3, 5, 6, 7)


CLIPPED = Scenario(
    schema=1,
    model=ModelSpec(name="mlp", hidden=5),
    world=WorldSpec(size=3),
    system=SystemSpec(stage=0),
    optimizer=OptimizerSpec(clip_norm=1e-3),
    run=RunSpec(steps=5),
)


TARGETS = {"whole": TorchDDP, "rows": TorchFSDP2}


def clipped(target):
    stage = target.capabilities.stages[0]
    return run_case(replace(CLIPPED, system=SystemSpec(stage=stage)), target=target)


@pytest.mark.parametrize("kind", TARGETS)
def test_clipping_by_norm_rounds_as_the_reference_does(kind):
    result = clipped(TARGETS[kind]())
    assert (result.verdict, result.findings, result.error) == ("pass", (), "")


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("whole", "of-elements"),
        ("whole", "of-rows"),
        ("rows", "of-elements"),
        ("rows", "of-params"),
    ],
)
def test_another_norm_rule_is_found(kind, rule):
    target = TARGETS[kind]()
    target.numerics = replace(target.numerics(CLIPPED), norm=rule)
    result = clipped(target)
    assert result.verdict == "fail"
    assert result.findings[0].check in ("equality.norm", "equality.master")


def test_norm_of_local_rows_is_found(monkeypatch):
    monkeypatch.setattr(FSDP2Engine, "_clip", clip_own_rows)
    assert clipped(TorchFSDP2()).verdict == "fail"


def clip_own_rows(self):
    self._reduced = {name: grad.clone() for name, grad in self._reduced.items()}
    grads = list(self._gradients().values())
    norm = nn.utils.get_total_norm(grads)
    for grad in grads:
        grad.mul_(torch.clamp(self._spec.clip_norm / (norm + 1e-6), max=1.0))


def test_norm_of_local_gradients_is_found(monkeypatch):
    def clip_before_the_sum(self, loss, *, last_micro, rows):
        loss.backward()
        nn.utils.clip_grad_norm_(self.named.values(), self._spec.clip_norm)

    monkeypatch.setattr(DDPEngine, "backward", clip_before_the_sum)
    assert run_case(CLIPPED, target=TorchDDP()).findings[0].check == "equality.grad"


@pytest.mark.parametrize(
    ("name", "engine"), [("torch-ddp", DDPEngine), ("torch-fsdp2", FSDP2Engine)]
)
def test_reduction_after_every_micro_batch_is_found(monkeypatch, name, engine):
    monkeypatch.setattr(engine, "start_micro_batch", lambda self, *, last: None)
    with pytest.raises(NotConformant) as failed:
        conformance(name, cases=60, shrink_seconds=3600)()
    assert failed.value.scenario.run.micro_batches > 1


def test_update_of_another_ranks_param_is_found(monkeypatch):
    right = ZeroRedundancyEngine.step

    def wrong(self, *, lr_factor):
        result = right(self, lr_factor=lr_factor)
        if dist.get_rank() == 1:
            next(iter(self._params.values())).data.mul_(2)
        return result

    monkeypatch.setattr(ZeroRedundancyEngine, "step", wrong)
    with pytest.raises(NotConformant, match="rank 1"):
        conformance("torch-zero-redundancy", cases=60)()


class TwoPaths(nn.Module):
    """Two params of one shape; a forward uses one of them."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.ones(2)) for _ in range(2))

    def forward(self, goes_left):
        return (self.left if goes_left else 3 * self.right).sum()


@pytest.mark.xfail(
    reason="torch 2.13's FSDP2 adds gradients of different params where ranks use different ones",
    raises=AssertionError,
    strict=True,
)
def test_gradients_of_different_params_are_not_mixed_across_ranks():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def program(rank):
        net = TwoPaths()
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        net(rank == 0).backward()
        grads = (net.left.grad, net.right.grad)
        return [None if grad is None else grad.to_local().clone() for grad in grads]

    with World(2) as world:
        of_ranks = world.run(program)
    # Means over two ranks, one of which contributes nothing.
    for left, right in of_ranks:
        assert left is None or torch.equal(left, torch.tensor([0.5]))
        assert right is None or torch.equal(right, torch.tensor([1.5]))


RECOMPUTED = Scenario(
    schema=1, model=ModelSpec(name="transformer-260", recompute="reentrant"),
    world=WorldSpec(size=2), run=RunSpec(steps=1, micro_batches=2),
)  # fmt: skip


def test_fsdp1_loses_gradients_around_a_reentrant_checkpoint():
    as_is = find_target("torch-fsdp1-as-is")
    case = replace(RECOMPUTED, system=SystemSpec(stage=3))
    (problem,) = refusals(find_target("torch-fsdp1"), case)
    assert problem.path == "model.recompute"
    assert run_case(case, target=as_is).findings[0].check == "equality.grad"


def test_ddp_find_unused_is_refused_under_a_reentrant_checkpoint():
    system = SystemSpec(stage=0, options=(OptionSpec(name="find_unused", value="true"),))
    (problem,) = refusals(find_target("torch-ddp"), replace(RECOMPUTED, system=system))
    assert "that a reentrant checkpoint uses in backward" in problem.message
