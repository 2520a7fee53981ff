"""torch cannot load the full state of an optimizer without state tensors, sharded or not.

Run: OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 torch-state-without-tensors.py
"""

import torch
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard

torch.distributed.init_process_group("gloo")
for is_sharded, from_first in ((True, True), (True, False), (False, True)):
    model = torch.nn.Linear(4, 4, bias=False)
    if is_sharded:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    full = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first)
    saved = state_dict.get_optimizer_state_dict(model, optimizer, options=full)
    try:
        state_dict.set_optimizer_state_dict(model, optimizer, saved, options=full)
        outcome = "loaded"
    except AssertionError as error:
        outcome = f"expected the saved state to be loaded, got AssertionError: {error}"
    print(f"sharded: {is_sharded}, broadcast: {from_first}: {outcome}")
torch.distributed.destroy_process_group()
