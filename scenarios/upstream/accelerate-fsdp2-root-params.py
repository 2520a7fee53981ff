"""accelerate's FSDP2 with cpu_ram_efficient_loading raises for a param of the root module.

Run: OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 accelerate-fsdp2-root-params.py
"""

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return x @ self.weight


accelerator = Accelerator(cpu=True)
if accelerator.num_processes > 1:
    # As AcceleratorState does on a GPU.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=True
    )
model = Scale()
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
accelerator.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
