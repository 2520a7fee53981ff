"""accelerate's FSDP2 leaves an optimizer the state of params that it replaced, and cannot save it.

Run: OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 accelerate-fsdp2-stale-state.py
"""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

accelerator = Accelerator(cpu=True)
# As AcceleratorState does where there is a GPU.
PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
model = torch.nn.Linear(4, 4, bias=False)
model, optimizer = accelerator.prepare(model, torch.optim.Adagrad(model.parameters()))
accelerator.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
print(f"expected state of 1 param, got that of shapes {[tuple(p.shape) for p in optimizer.state]}")
print(f"  of which are sharded: {[type(p).__name__ == 'DTensor' for p in optimizer.state]}")
try:
    accelerator.save_state(tempfile.mkdtemp())
    print("saved")
except KeyError as error:
    print(f"expected a checkpoint, got KeyError: {error}")

# An optimizer that goes on, as after `load_state_dict`.
model = torch.nn.Linear(4, 4, bias=False)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
print(f"expected a state of 4 steps, got {int(optimizer.state[model.weight]['step'])}")
torch.distributed.destroy_process_group()
