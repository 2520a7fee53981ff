"""Tensor and sequence parallel like in torch's examples."""

import os

import torch
import torch.nn as nn
from torch.distributed._tensor import Shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(6, 8)
        self.relu = nn.ReLU()
        self.out_proj = nn.Linear(8, 5)

    def forward(self, x):
        return self.out_proj(self.relu(self.in_proj(x)))


world_size = int(os.environ["WORLD_SIZE"])
device_type = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device_type, (world_size,))
rank = mesh.get_rank()
torch.manual_seed(3)
plan = {
    "in_proj": ColwiseParallel(input_layouts=Shard(0)),
    "out_proj": RowwiseParallel(output_layouts=Shard(0)),
}
model = parallelize_module(ToyModel().to(device_type), mesh, plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
for _ in range(3):
    torch.manual_seed(rank)
    loss = model(torch.rand(2, 6, device=device_type)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", repr(loss.item()))
