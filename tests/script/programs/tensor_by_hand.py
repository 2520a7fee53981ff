"""Tensor parallel by hand: autograd functions that reduce, groups from a module's globals."""

import parallel_state
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=parallel_state.tensor_group())
        return grad


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x, group=parallel_state.tensor_group())
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class ParallelMLP(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        rank = dist.get_rank(parallel_state.tensor_group())
        share = hidden // dist.get_world_size(parallel_state.tensor_group())
        mine = slice(rank * share, (rank + 1) * share)
        whole = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(hidden, dim, generator=whole)[mine] / dim)
        self.down = nn.Parameter(torch.randn(dim, hidden, generator=whole)[:, mine] / hidden)

    def forward(self, x):
        up = nn.functional.gelu(nn.functional.linear(Copy.apply(x), self.up))
        return x + Reduce.apply(nn.functional.linear(up, self.down))


def main():
    dist.init_process_group("gloo")
    parallel_state.initialize(tensor_size=2)
    data_rank = dist.get_rank(parallel_state.data_group())
    model = nn.Sequential(ParallelMLP(6, 8), nn.LayerNorm(6), ParallelMLP(6, 8))
    model = DDP(model, process_group=parallel_state.data_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        draws = torch.Generator().manual_seed(10 * step + data_rank)
        loss = (model(torch.randn(4, 6, generator=draws)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        print(f"step {step} loss {loss.item()!r} mean loss {mean.item() / dist.get_world_size()!r}")
    seen = [None] * dist.get_world_size()
    dist.all_gather_object(seen, {"rank": dist.get_rank(), "loss": loss.item()})
    print("seen", [each["rank"] for each in seen])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
