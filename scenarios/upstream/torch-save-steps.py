"""get_optimizer_state_dict before the first step leaves a step counter of 1.

Run: OMP_NUM_THREADS=1 torchrun --nproc-per-node 1 torch-save-steps.py
"""

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def trained(is_saved):
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    if is_saved:
        get_optimizer_state_dict(model, optimizer)
    for x in (1.0, 2.0):
        optimizer.zero_grad()
        model(torch.full((1, 1), x)).sum().backward()
        optimizer.step()
    return model.weight.item(), optimizer.state[model.weight]["step"].item()


torch.distributed.init_process_group("gloo")
for is_saved in (False, True):
    weight, steps = trained(is_saved)
    print(f"saved before the first step: {is_saved}: weight {weight}, {steps:g} steps, expected 2")
torch.distributed.destroy_process_group()
