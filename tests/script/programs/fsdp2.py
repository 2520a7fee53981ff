"""FSDP2 like in torch's example: meta init, mixed precision, checkpoint on rank 0."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

rank = int(os.environ["LOCAL_RANK"])
if torch.accelerator.is_available():
    device_type = torch.accelerator.current_accelerator()
    device = torch.device(f"{device_type.type}:{rank}")
    torch.accelerator.set_device_index(rank)
else:
    device = torch.device("cpu")
backend = torch.distributed.get_default_backend_for_device(device)
dist.init_process_group(backend=backend, device_id=device if device.type != "cpu" else None)

torch.manual_seed(0)
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
model.to_empty(device=device.type)
torch.manual_seed(1)
for param in model.parameters():
    nn.init.uniform_(param, -0.1, 0.1)
optim = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(100 + rank)
for _ in range(2):
    x = torch.rand(4, 6, device=device)
    loss = model(x).float().square().sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optim.step()
    optim.zero_grad()
    print("loss", repr(loss.item()))
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
state = get_model_state_dict(model, options=options)
if rank == 0:
    torch.save(state, "model_state_dict.pt")
    print({name: tensor.double().sum().item() for name, tensor in state.items()})
dist.destroy_process_group()
