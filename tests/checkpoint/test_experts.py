"""Checkpoints of params that only some ranks hold."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_sim.checkpoint import load, save
from zero_sim.errors import CheckpointError
from zero_sim.zero import (
    DistributedDataParallel,
    DistributedOptimizer,
    ZeroConfig,
)
from zero_sim.zero.variants.model_groups import build_expert_groups


class Part(nn.Module):
    """A dense param and this rank's share of four experts."""

    def __init__(self, index, ep):
        super().__init__()
        self.dense = nn.Parameter(torch.arange(3.0))
        for i in range(4)[index * 4 // ep : (index + 1) * 4 // ep]:
            self.register_parameter(f"expert{i}", nn.Parameter(torch.arange(5.0) + i))


def kind_of(name, tensor):
    return "expert" if name.startswith("expert") else "dense"


def build(rank, ep, *, zeroed=False, module=None, lr=0.5, group_of=None):
    module = Part(rank % ep, ep) if module is None else module
    if zeroed:
        for param in module.parameters():
            param.data.zero_()
    groups = {"expert": build_expert_groups(dist.group.WORLD, expert_parallel=ep)}
    ddp = DistributedDataParallel(
        module,
        config=ZeroConfig(),
        group=dist.group.WORLD,
        kind_of=kind_of,
        kind_groups=groups if ep > 1 else {},
    )
    return ddp, DistributedOptimizer(
        ddp, optim_factory=lambda ps: torch.optim.SGD(ps, lr=lr), group_of=group_of
    )


@pytest.fixture
def saved(run_ranks, tmp_path):
    """Save a run; return the path."""

    def go(ranks, ep, *, form="sharded", **options):
        def program(rank):
            ddp, optimizer = build(rank, ep, **options)
            save(tmp_path / "c", ddp=ddp, optimizer=optimizer, form=form)

        run_ranks(ranks, program)
        return tmp_path / "c"

    return go


@pytest.mark.parametrize("form", ["sharded", "consolidated"])
@pytest.mark.parametrize(("ranks", "ep"), [(4, 2), (4, 4), (2, 1), (3, 1)])
def test_experts_load_with_other_ranks_and_expert_parallelism(run_ranks, saved, form, ranks, ep):
    """Names are global, so each rank finds the experts that it now holds."""
    path = saved(4, 2, form=form)

    def loading(rank):
        ddp, optimizer = build(rank, ep, zeroed=True)
        load(path, ddp=ddp, optimizer=optimizer)
        return {name: param.tolist() for name, param in ddp.params.items()}

    found = run_ranks(ranks, loading)
    for held in found:
        for name, values in held.items():
            start = 0 if name == "dense" else int(name[-1])
            assert values == [start + i for i in range(len(values))]
    assert {name for held in found for name in held} == {"dense", *(f"expert{i}" for i in range(4))}


def test_param_group_without_own_params_is_absent(run_ranks, saved):
    """A rank has groups up to the last one with a param of its own."""

    def group_of(name):
        return int(name == "expert3")

    path = saved(4, 4, lr=0.25, group_of=group_of)

    def loading(rank):
        ddp, optimizer = build(rank, 4, group_of=group_of)
        load(path, ddp=ddp, optimizer=optimizer)
        return [group["lr"] for group in optimizer.inner.param_groups]

    assert run_ranks(4, loading) == [[0.25], [0.25], [0.25], [0.25, 0.25]]


def test_expert_that_no_rank_holds_is_refused(run_ranks, saved):
    path = saved(2, 2)

    def loading(rank):
        # Two ranks with two of four shares.
        ddp, optimizer = build(rank, 2, module=Part(rank, 4))
        with pytest.raises(CheckpointError, match="'expert2' is in the checkpoint but not"):
            load(path, ddp=ddp, optimizer=optimizer)

    run_ranks(2, loading)


def test_two_experts_of_one_name_are_refused(run_ranks, tmp_path):
    """With local names, as in a module list, only one of them would be saved."""

    def program(rank):
        ddp, optimizer = build(rank, 2, module=Part(0, 4))
        with pytest.raises(CheckpointError, match="two called 'expert0', in the groups of ranks 0"):
            save(tmp_path / "c", ddp=ddp, optimizer=optimizer)

    run_ranks(2, program)


def test_frozen_experts_are_refused(run_ranks, tmp_path):
    """One rank saves all frozen params, but lacks the experts of the others."""

    def program(rank):
        module = Part(rank, 2)
        module.get_parameter(f"expert{2 * rank}").requires_grad_(False)
        ddp, optimizer = build(rank, 2, module=module)
        with pytest.raises(
            CheckpointError, match=r"frozen 'expert[02]', which only some ranks hold"
        ):
            save(tmp_path / "c", ddp=ddp, optimizer=optimizer)

    run_ranks(2, program)
