"""accelerate's FSDP2 with activation_checkpointing raises if no wrap policy is set.

Run: OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 accelerate-fsdp2-checkpointing.py
"""

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

accelerator = Accelerator(cpu=True)
if accelerator.num_processes > 1:
    # As AcceleratorState does on a GPU.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, activation_checkpointing=True
    )
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
accelerator.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
