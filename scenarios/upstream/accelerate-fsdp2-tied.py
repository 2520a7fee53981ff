"""accelerate's FSDP2 with size_based_wrap puts a tied param into two groups, which torch refuses.

Run: OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 accelerate-fsdp2-tied.py
"""

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.again = torch.nn.Linear(4, 4, bias=False)
        self.again.weight = self.first.weight

    def forward(self, x):
        return self.again(self.first(x))


accelerator = Accelerator(cpu=True)
if accelerator.num_processes > 1:
    # As AcceleratorState does on a GPU.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=8
    )
model = Tied()
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
accelerator.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
