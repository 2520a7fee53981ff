"""Two dimensions: tensor and sequence parallel inside a node, FSDP2 across, on one mesh."""

import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

tp_size = 2
dim, hidden, vocab = 8, 12, 10


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.feed_forward = FeedForward()

    def forward(self, x):
        return x + self.feed_forward(self.norm(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


device_type = "cuda" if torch.cuda.is_available() else "cpu"
world_size = int(os.environ["WORLD_SIZE"])
mesh = init_device_mesh(device_type, (world_size // tp_size, tp_size), mesh_dim_names=("dp", "tp"))
tp_mesh, dp_mesh = mesh["tp"], mesh["dp"]
torch.manual_seed(5)
model = Transformer().to(device_type)
model = parallelize_module(
    model,
    tp_mesh,
    {
        "embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    },
)
for layer in model.layers:
    plan = {
        "norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }
    parallelize_module(layer, tp_mesh, plan)
    fully_shard(layer, mesh=dp_mesh)
fully_shard(model, mesh=dp_mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2, foreach=True)
for index in range(3):
    # Ranks of one tensor-parallel group get the same batch.
    torch.manual_seed(100 * index + dp_mesh.get_local_rank())
    tokens = torch.randint(vocab, (2, 6), device=device_type)
    logits = model(tokens[:, :4])
    loss = nn.functional.cross_entropy(logits.reshape(-1, vocab), tokens[:, 1:5].reshape(-1))
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    optimizer.step()
    optimizer.zero_grad()
    print(f"iter {index} loss {loss.item()!r} norm {norm.item()!r}")
