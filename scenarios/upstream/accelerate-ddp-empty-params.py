"""accelerate's save_state leaves out params without elements but one, and load_state raises.

Run: OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 accelerate-ddp-empty-params.py
"""

import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.empty(0)) for _ in range(2))
        self.weight = torch.nn.Parameter(torch.ones(1))


accelerator = Accelerator(cpu=True)
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
model = Model()
accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
accelerator.save_state(folder[0])
dist.barrier()
try:
    accelerator.load_state(folder[0])
    print("loaded")
except RuntimeError as error:
    print(f"expected what was saved, got {' '.join(str(error).split())}")
dist.destroy_process_group()
