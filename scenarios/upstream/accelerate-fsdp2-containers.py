"""accelerate's FSDP2 with size_based_wrap raises for a model with a ModuleList.

Run: OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 accelerate-fsdp2-containers.py
"""

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


accelerator = Accelerator(cpu=True)
if accelerator.num_processes > 1:
    # As AcceleratorState does on a GPU.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=8
    )
model = Layers()
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
accelerator.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
