"""ShardedDDP reduces stale buffers after a zero_grad that sets gradients to None.

Run: torchrun --nproc-per-node 2 fairscale-zero-grad.py
"""

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS


class Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))

    def forward(self, x):
        return (self.a * x + self.b * x).sum()


dist.init_process_group("gloo")
rank = dist.get_rank()
model = Sum()
optimizer = OSS(model.parameters(), optim=torch.optim.SGD, lr=1.0)
sharded = ShardedDataParallel(model, optimizer)
for step, x in enumerate((1.0, 10.0)):
    optimizer.zero_grad()
    sharded(torch.full((1,), x * 2 * rank)).backward()  # the mean of both ranks is x
    owned = [(n, p.grad.item()) for n, p in model.named_parameters() if p.grad is not None]
    print(f"step {step}, rank {rank}: gradients {owned}, expected {x} where it owns")
    optimizer.step()
print(f"rank {rank}: a = {model.a.item()}, b = {model.b.item()}, expected -11.0 both")
dist.destroy_process_group()
