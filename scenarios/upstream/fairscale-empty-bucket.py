"""ShardedDDP cannot build a buffer for params without elements.

Run: torchrun --nproc-per-node 2 fairscale-empty-bucket.py
"""

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS


class WithEmpty(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.empty = torch.nn.Parameter(torch.zeros(0))
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.weight.sum() * x + self.empty.sum()


dist.init_process_group("gloo")
model = WithEmpty()
optimizer = OSS(model.parameters(), optim=torch.optim.SGD, lr=1.0)
try:
    ShardedDataParallel(model, optimizer)(torch.ones(())).backward()
    print(f"rank {dist.get_rank()}: trained, as expected", flush=True)
except AssertionError as error:
    print(f"rank {dist.get_rank()}: AssertionError: {error}", flush=True)
