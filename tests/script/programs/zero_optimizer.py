"""ZeroRedundancyOptimizer with DDP, uneven inputs under Join, and its state gathered on rank 0."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)]))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01
    )
    torch.manual_seed(10 + rank)
    with Join([model, optimizer]):
        for step in range(2 + rank % 2):
            loss = model(torch.rand(3, 6)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item()!r}")
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        state = optimizer.state_dict()["state"]
        print("state", repr(sum(each["exp_avg"].double().sum().item() for each in state.values())))
    print("sum of params", repr(sum(p.double().sum().item() for p in model.parameters())))


if __name__ == "__main__":
    main()
