"""accelerate's FSDP2 drops the state of an optimizer that has stepped before `prepare`.

Run: OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 accelerate-fsdp2-stale-state.py
"""

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
if accelerator.num_processes > 1:
    # As AcceleratorState does on a GPU.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
# An optimizer with state, as after `load_state_dict`.
model = torch.nn.Linear(4, 4, bias=False)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    model.weight.grad = torch.ones(4, 4)
    optimizer.step()
optimizer.zero_grad()
model, optimizer = accelerator.prepare(model, optimizer)
rows = torch.arange(8.0).view(2, 4).tensor_split(accelerator.num_processes)
accelerator.backward(model(rows[accelerator.process_index]).mean())
optimizer.step()
