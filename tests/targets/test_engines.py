"""Engines around an optimizer: correct by default, and faults in their hooks are found."""

import pytest
import torch
import torch.distributed as dist

from zero_sim import run_case
from zero_sim.scenario.spec import (
    FreezeSpec,
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.targets import (
    OPTIMIZER_SETTINGS,
    Capabilities,
    FlatShardEngine,
    Numerics,
    WholeParamEngine,
    class_of,
    flat_parts,
    param_groups,
    plain_optimizer,
    settings_of,
)

SHAPES = ((3,), (2, 2), (), (0,), (5,))
SHOWN = {
    "masters and optimizer state",
    "reduced gradients",
    "gradients between steps and their padding",
}


def judged(
    build, *, shapes=SHAPES, stage=1, dtype="fp32", reported_dtype="sum", freeze=(), **optimizer
):
    class Mine:
        name = "mine"
        capabilities = Capabilities(
            stages=(0, 1), dtypes=("fp32", "bf16"), optimizers=("adamw", "sgd"),
            follows=(*OPTIMIZER_SETTINGS, "run.micro_batches", "model.freeze"),
        )  # fmt: skip
        numerics = Numerics(reported_grads="after-division", reported_dtype=reported_dtype)

        def build(self, module, *, scenario, group):
            return build(module, scenario, group)

    case = Scenario(
        schema=1, name="case", world=WorldSpec(size=3), run=RunSpec(steps=3, micro_batches=2),
        model=ModelSpec(name="params", shapes=shapes, dtype=dtype, freeze=freeze),
        system=SystemSpec(stage=stage),
        optimizer=OptimizerSpec(**({"name": "adamw", "weight_decay": 0.1} | optimizer)),
    )  # fmt: skip
    return run_case(case, target=Mine())


def passes(result):
    assert (result.verdict, result.findings, result.error) == ("pass", (), "")
    assert not SHOWN & set(result.unobserved)
    return True


def first(result):
    assert result.verdict == "fail", result.error
    return result.findings[0].check


def whole(kind=WholeParamEngine, **options):
    def build(module, scenario, group):
        optimizer = plain_optimizer(scenario.optimizer, dict(module.named_parameters()))
        return kind(module, optimizer, group=group, **options)

    return build


def flat(kind=FlatShardEngine):
    def build(module, scenario, group):
        return kind(module, lambda s: plain_optimizer(scenario.optimizer, s), group=group)

    return build


def owner(name):
    return int(name[1:]) % 2  # Rank 2 owns nothing.


def test_whole_params_stepped_by_every_rank_pass():
    assert passes(judged(whole(), stage=0, warmup_steps=2))


def test_frozen_param_is_not_stepped():
    freeze = (FreezeSpec(param="p1", start=1, stop=2),)
    assert passes(judged(whole(), stage=0, freeze=freeze))


def test_rank_without_params_passes():
    assert passes(judged(whole(owner_of=owner)))


class Sharded(torch.optim.Optimizer):
    """Optimizer that steps its own params and broadcasts them, as in an exercise."""

    def __init__(self, spec, named, group):
        self.named, self.group = named, group
        super().__init__(param_groups(spec, named), {"lr": spec.lr})
        own = {n: p for n, p in named.items() if owner(n) == group.rank()}
        groups = param_groups(spec, own)
        self.own = class_of(spec)(groups, **settings_of(spec)) if own else None

    def step(self):
        if self.own is not None:
            for group in self.own.param_groups:
                group["lr"] = self.param_groups[0]["lr"]
            self.own.step()
        for name, param in self.named.items():
            dist.broadcast(param.detach(), group_src=owner(name), group=self.group)


class Exercise(WholeParamEngine):
    def share(self):
        pass

    def state_of(self, param):
        return {} if self.optimizer.own is None else self.optimizer.own.state.get(param, {})


def test_optimizer_that_shards_and_broadcasts_itself_passes():
    def build(module, scenario, group):
        optimizer = Sharded(scenario.optimizer, dict(module.named_parameters()), group)
        return Exercise(module, optimizer, group=group, owner_of=owner)

    assert passes(judged(build, warmup_steps=2))


class Undivided(WholeParamEngine):
    def reduce(self):
        for param in self.named.values():
            dist.all_reduce(param.grad, group=self.group)


class Unshared(WholeParamEngine):
    def share(self):
        pass


@pytest.mark.parametrize(
    ("kind", "check"), [(Undivided, "equality.grad"), (Unshared, "equality.params")]
)
def test_wrong_hook_of_whole_params_is_found(kind, check):
    assert first(judged(whole(kind, owner_of=owner))) == check


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_flat_shards_pass(dtype):
    told = "sum" if dtype == "fp32" else "fp32"
    assert passes(judged(flat(), dtype=dtype, reported_dtype=told, warmup_steps=2))


def test_more_ranks_than_elements_pass():
    assert passes(judged(flat(), shapes=((1,), (1,))))


class Uneven(FlatShardEngine):
    def shard_of(self, elems, rank):
        least, longer = divmod(elems, self.group.size())
        start = rank * least + min(rank, longer)
        return start, start + least + (rank < longer)


def test_uneven_flat_shards_pass():
    assert passes(judged(flat(Uneven)))


class UndividedShards(FlatShardEngine):
    def reduce(self, buffer, grads):
        return super().reduce(buffer, grads) * self.group.size()


class Ungathered(FlatShardEngine):
    def gather(self, buffer):
        buffer.flat[buffer.first : buffer.first + len(buffer.shard)] = buffer.shard.detach()


class Stepped(FlatShardEngine):
    def update(self):
        super().update()
        with torch.no_grad():
            next(iter(self.buffers.values())).shard.add_(1)


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (UndividedShards, "equality.grad"),
        (Ungathered, "equality.params"),
        (Stepped, "equality.master"),
    ],
)
def test_wrong_hook_of_flat_shards_is_found(kind, check):
    assert first(judged(flat(kind))) == check


def test_written_padding_is_found():
    class Padded(FlatShardEngine):
        def update(self):
            super().update()
            (buffer,) = self.buffers.values()
            with torch.no_grad():
                buffer.shard[13 - buffer.first :] = 1.0

    assert first(judged(flat(Padded))) == "invariant.padding"


def test_missing_part_is_an_ownership_finding():
    class Late(FlatShardEngine):
        def parts(self):
            parts = list(super().parts())
            return parts[1:] if self.group.rank() == 0 else parts

    assert first(judged(flat(Late))) == "invariant.ownership"


def test_parts_of_a_flat_shard_include_its_padding():
    """The norm of a shard has other bits without the padding after its last param."""
    params = {"a": torch.zeros(3), "b": torch.zeros(2)}
    shard = torch.zeros(4)
    (part,) = flat_parts(params, first=4, master=shard, grad=None, state={})
    assert (part.place.shard_start, part.place.shard_stop) == (4, 8)
    assert (part.place.param, part.place.start, part.place.stop) == ("b", 1, 2)
