"""Experts, which only some ranks have: groups, sums, norm and initial values."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.configs import zero_config
from zero_sim.errors import LayoutError, UsageError
from zero_sim.zero import (
    DistributedDataParallel,
    DistributedOptimizer,
    KindGroups,
    ZeroConfig,
    build_redundancy_groups,
)
from zero_sim.zero.schedule import schedule_grads
from zero_sim.zero.seams import TEXTBOOK, Seams
from zero_sim.zero.unit import Unit
from zero_sim.zero.variants.model_groups import build_expert_groups
from zero_sim.zero.variants.root_reduce import (
    AllReducedUnit,
    SummedAtFirstUnit,
    UnderBackwardAtFirst,
)

GLOBAL_RANKS = dist.get_process_group_ranks


class Part(nn.Module):
    """`dense` on all ranks and a single expert, `expert0` or `expert1`."""

    def __init__(self, index, fill=0.0):
        super().__init__()
        self.dense = nn.Parameter(torch.full((3,), fill))
        self.register_parameter(f"expert{index}", nn.Parameter(torch.full((5,), fill)))


def kind_of(name, tensor):
    return "expert" if "expert" in name else "dense"


def wrap(module, *, group=None, buffer_of=None, seams=TEXTBOOK, **config):
    group = dist.group.WORLD if group is None else group
    config = zero_config(**config)
    experts = build_expert_groups(group, expert_parallel=2, redundancy=config.redundancy)
    return DistributedDataParallel(
        module,
        config=config,
        group=build_redundancy_groups(group, redundancy=config.redundancy),
        kind_of=kind_of,
        kind_groups={"expert": experts},
        buffer_of=buffer_of,
        seams=seams,
    )


def backward(ddp, value):
    sum(value * param.sum() for param in ddp.params.values()).backward()
    ddp.finish_grad_sync()


class TestGroups:
    """Expert groups: group ranks e, e + ep, ... have the same experts."""

    def test_members_of_each_group(self, run_ranks):
        def program(rank):
            groups = build_expert_groups(dist.group.WORLD, expert_parallel=2, redundancy=2)
            assert groups.replica_group is not None
            return tuple(
                GLOBAL_RANKS(each)
                for each in (groups.group, groups.shard_group, groups.replica_group)
            )

        results, _ = run_ranks(8, program)
        assert results[:4] == [
            ([0, 2, 4, 6], [0, 2], [0, 4]),
            ([1, 3, 5, 7], [1, 3], [1, 5]),
            ([0, 2, 4, 6], [0, 2], [2, 6]),
            ([1, 3, 5, 7], [1, 3], [3, 7]),
        ]

    def test_follow_group_ranks_in_a_subgroup(self, run_ranks):
        """The group rank counts, not the global rank, and outside ranks are not waited for."""

        def program(rank):
            group = dist.new_group([1, 2, 4, 5])
            if rank in (0, 3):
                return None
            groups = build_expert_groups(group, expert_parallel=2)
            return GLOBAL_RANKS(groups.group)

        results, _ = run_ranks(6, program)
        assert results == [None, [1, 4], [2, 5], None, [1, 4], [2, 5]]

    def test_expert_parallel_1_uses_the_group_of_all_ranks(self, lone_group):
        groups = build_expert_groups(lone_group, expert_parallel=1)
        assert (groups.group, groups.shard_group) == (lone_group, lone_group)

    @pytest.mark.parametrize("ep", [0, 3])
    def test_uneven_expert_groups_are_refused(self, run_ranks, ep):
        def program(rank):
            with pytest.raises(LayoutError, match=f"got {ep} for 4 ranks"):
                build_expert_groups(dist.group.WORLD, expert_parallel=ep)

        run_ranks(4, program)

    def test_groups_outside_the_training_ranks_are_refused(self, run_ranks):
        def program(rank):
            alone = [dist.new_group([r]) for r in range(2)][rank]
            groups = KindGroups(group=dist.group.WORLD, shard_group=dist.group.WORLD)
            with pytest.raises(UsageError, match="among those that train together"):
                DistributedDataParallel(
                    Part(0),
                    config=ZeroConfig(),
                    group=alone,
                    kind_of=kind_of,
                    kind_groups={"expert": groups},
                )

        run_ranks(2, program)


class TestTraining:
    """Experts are summed over the ranks that have them, other params over all ranks."""

    @pytest.mark.parametrize(
        "config", [{"stage": 0}, {}, {"redundancy": 2}, {"partition": "uneven"}]
    )
    @pytest.mark.parametrize("overlap", [False, True])
    def test_sums(self, run_ranks, config, overlap):
        """Rank r contributes r + 1: 10 in total, 1 + 3 for one expert, 2 + 4 for the other."""

        def program(rank):
            ddp = wrap(Part(rank % 2), overlap_grads=overlap, **config)
            if overlap:
                ddp.begin_last_micro_batch()
            backward(ddp, rank + 1.0)
            return {
                (name, value)
                for buffer in ddp.buffers
                for name, param in ddp.params.items()
                if param in buffer.memory
                for value in buffer.get_grad_shard(param).tolist()
            }

        results, _ = run_ranks(4, program)
        assert set().union(*results) == {("dense", 10.0), ("expert0", 4.0), ("expert1", 6.0)}

    @pytest.mark.parametrize("config", [{"stage": 0}, {}, {"redundancy": 2}])
    def test_experts_are_divided_by_the_number_of_all_ranks(self, run_ranks, config):
        """Sums of 10, 4 and 6, each divided by 4."""

        def program(rank):
            ddp = wrap(Part(rank % 2), **config)
            optimizer = DistributedOptimizer(
                ddp, optim_factory=lambda params: torch.optim.SGD(params, lr=1.0)
            )
            backward(ddp, rank + 1.0)
            result = optimizer.step()
            values = {name: set(param.tolist()) for name, param in ddp.params.items()}
            return values, result.norm.item() ** 2

        results, _ = run_ranks(4, program)
        for rank, (values, squares) in enumerate(results):
            expert = {f"expert{rank % 2}": {-1.5} if rank % 2 else {-1.0}}
            assert values == {"dense": {-2.5}, **expert}
            # 3 elements of 2.5, 5 of 1, 5 of 1.5, each once.
            assert squares == pytest.approx(3 * 6.25 + 5 + 5 * 2.25)

    @pytest.mark.parametrize("stage", [0, 1])
    def test_experts_start_equal_on_their_ranks(self, run_ranks, stage):
        """Each expert equals that on the first rank of its group; other params equal rank 0's."""

        def program(rank):
            ddp = wrap(Part(rank % 2, fill=float(rank)), stage=stage)
            return [param[0].item() for param in ddp.params.values()]

        results, _ = run_ranks(4, program)
        assert results == [[0, 0], [0, 1], [0, 0], [0, 1]]

    def test_frozen_experts_start_equal_on_their_ranks(self, run_ranks):
        def program(rank):
            module = Part(rank % 2, fill=float(rank))
            expert = module.get_parameter(f"expert{rank % 2}").requires_grad_(False)
            wrap(module)
            return expert[0].item()

        results, _ = run_ranks(4, program)
        assert results == [0, 1, 0, 1]


class Scale(nn.Module):
    """A module with a single param, of an expert or dense."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        elems = 1 if name == "expert" else 2
        self.register_parameter(name, nn.Parameter(torch.full((elems,), 2.0)))

    def forward(self, x):
        return x * self.get_parameter(self.name)


class TestOneOrder:
    """Ranks with different numbers of expert units between the common units."""

    @pytest.mark.parametrize("prefetch", [0, 1, 2])
    @pytest.mark.parametrize("unit", [Unit, AllReducedUnit, SummedAtFirstUnit])
    @pytest.mark.parametrize("reshard", [True, False])
    @pytest.mark.parametrize("last", ["dense", "expert"])
    def test_ranks_issue_common_collectives_in_one_order(
        self, run_ranks, prefetch, unit, reshard, last
    ):
        """Odd ranks have a buffer for each expert; even ranks have one for both."""
        names = ["dense", "expert", "dense", "expert", *(["dense"] if last == "dense" else [])]

        def program(rank):
            module = nn.Sequential(*map(Scale, names))
            ddp = wrap(
                module,
                buffer_of=lambda name: int(name[0]) if rank % 2 and "expert" in name else 0,
                stage=3,
                bucket_elems=2,
                seams=Seams(
                    unit=unit,
                    grads=partial(schedule_grads, under_backward=UnderBackwardAtFirst),
                ),
                prefetch=prefetch,
                overlap_grads=True,
                reshard_after_forward=reshard,
            )
            ddp.begin_last_micro_batch()
            x = torch.full((2,), rank + 1.0)
            module(x).sum().backward()
            ddp.finish_grad_sync()

        run_ranks(4, program)
