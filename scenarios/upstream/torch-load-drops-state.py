"""set_state_dict loads no optimizer state into a model that has gradients.

Run: OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 torch-load-drops-state.py
"""

import tempfile

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def built():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


dist.init_process_group("gloo")
folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
dist.broadcast_object_list(folder)
model, optimizer = built()
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
checkpoint.save(saved, checkpoint_id=folder[0])
for has_gradients in (False, True):
    model, optimizer = built()
    if has_gradients:
        model(torch.ones(2, 4)).sum().backward()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.load(state, checkpoint_id=folder[0])
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    keys = sorted(optimizer.state[model.weight])
    print(f"gradients: {has_gradients}: loaded {keys}, expected exp_avg, exp_avg_sq, step")
dist.destroy_process_group()
