"""CommDebugMode counts the collectives of simulated groups for each rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

c10d = torch.ops.c10d

CALLS = {
    "allreduce_": lambda x: dist.all_reduce(x),
    "allreduce_coalesced_": lambda x: dist.group.WORLD.allreduce_coalesced([x, x + 1]).wait(),
    "broadcast_": lambda x: dist.broadcast(x, 0),
    "reduce_": lambda x: dist.reduce(x, 0),
    "allgather_": lambda x: dist.all_gather([x.clone(), x.clone()], x),
    "_allgather_base_": lambda x: dist.all_gather_into_tensor(torch.zeros(8), x),
    "_reduce_scatter_base_": lambda x: dist.reduce_scatter_tensor(torch.zeros(2), x),
    "reduce_scatter_": lambda x: dist.reduce_scatter(x, [x.clone(), x.clone()]),
    "alltoall_base_": lambda x: dist.all_to_all_single(torch.zeros(4), x),
    "alltoall_": lambda x: dist.all_to_all([x.clone(), x.clone()], [x, x + 1]),
    "gather_": lambda x: dist.gather(x, None if dist.get_rank() else [x.clone(), x.clone()]),
    "scatter_": lambda x: dist.scatter(x, None if dist.get_rank() else [x.clone(), x.clone()]),
}


@pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning")
@pytest.mark.parametrize("operator", CALLS)
def test_collective_is_counted_as_its_operator(world_of, operator):
    def program(rank):
        with CommDebugMode() as mode:
            CALLS[operator](torch.ones(4))
        return dict(mode.get_comm_counts())

    assert world_of(2).run(program) == [{getattr(c10d, operator): 1}] * 2


def test_a_functional_collective_is_counted_once(world_of):
    def program(rank):
        with CommDebugMode() as mode:
            all_reduce(torch.ones(4), "sum", dist.group.WORLD).sum().item()
        return mode.get_total_counts()

    assert world_of(2).run(program) == [1, 1]


def test_rank_counts_only_its_own_calls(world_of):
    def program(rank):
        pair = dist.new_group([0, 1])
        with CommDebugMode() as mode:
            dist.barrier()
            if rank < 2:
                dist.all_reduce(torch.ones(1), group=pair)
            dist.barrier()
        return mode.get_total_counts()

    assert world_of(3).run(program) == [1, 1, 0]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_gathers_of_fsdp_are_counted(world_of):
    def program(rank):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with CommDebugMode() as mode:
            model(torch.ones(3, 2))
        return mode.get_comm_counts()[c10d._allgather_base_]

    assert world_of(2).run(program) == [2, 2]
