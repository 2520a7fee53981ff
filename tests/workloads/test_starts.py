"""Different initial values on ranks other than the first."""

import torch
from torch import nn

from zero_sim.workloads import make_distinct, make_unloaded


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.eights = nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn), requires_grad=False)
        self.strided = nn.Parameter(torch.zeros(2, 3).t())
        self.register_buffer("scale", torch.zeros(()))
        self.experts = nn.ModuleList([nn.Linear(2, 2)])
        with torch.no_grad():
            self.experts[0].weight.zero_()
            self.experts[0].bias.zero_()


def overwritten(*, rank, ep):
    net = Net()
    make_distinct(net, rank=rank, ep=ep)
    named = (*net.named_parameters(), *net.named_buffers())
    return {name for name, tensor in named if bool(tensor.float().all())}


DENSE = {"dense", "frozen", "eights", "strided", "scale"}
EXPERT = {"experts.0.weight", "experts.0.bias"}


def test_first_rank_keeps_its_initial_values():
    assert overwritten(rank=0, ep=1) == set()


def test_other_ranks_start_with_other_values():
    assert overwritten(rank=1, ep=1) == DENSE | EXPERT


def test_first_rank_of_each_expert_group_keeps_its_experts():
    assert overwritten(rank=1, ep=2) == DENSE
    assert overwritten(rank=2, ep=2) == DENSE | EXPERT


def test_params_keep_their_memory():
    net = Net()
    before = {name: param.data_ptr() for name, param in net.named_parameters()}
    make_distinct(net, rank=1, ep=1)
    assert {name: param.data_ptr() for name, param in net.named_parameters()} == before


def test_unloaded_module_has_other_values_for_saved_buffers():
    net = Net()
    net.register_buffer("rebuilt", torch.zeros(()), persistent=False)
    net.tied = net.dense
    make_unloaded(net)
    named = (*net.named_parameters(), *net.named_buffers())
    assert {name for name, tensor in named if bool(tensor.float().any())} == {"scale"}
