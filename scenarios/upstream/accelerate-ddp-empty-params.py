"""accelerate's save_state drops all but one param without elements, and load_state raises.

Run: OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 accelerate-ddp-empty-params.py
"""

import torch
from accelerate import Accelerator


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.empty(0)) for _ in range(2))
        self.weight = torch.nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return x @ self.weight + self.first.sum() + self.second.sum()


accelerator = Accelerator(cpu=True)
model = Model()
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
accelerator.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
accelerator.save_state("saved")
accelerator.wait_for_everyone()
accelerator.load_state("saved")
