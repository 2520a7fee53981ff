"""Scripts for GPUs, run on the CPU."""

import subprocess
import sys

import torch


def test_devices_named_cuda_are_the_cpu(launch):
    before = torch.cuda.is_available
    run = launch(
        """
import os
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP
rank = int(os.environ["LOCAL_RANK"])
assert torch.cuda.is_available() and torch.cuda.device_count() == 2
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device(f"cuda:{rank}"))
torch.cuda.manual_seed_all(3)
device = torch.device("cuda", rank)
assert device.type == "cuda"
for x in (
    torch.ones(2, device=device),
    torch.ones(2, device="cuda"),
    torch.ones(2, device=rank),
    torch.ones(2).to(device),
    torch.ones(2).to(rank),
    torch.ones(2).to("cuda:0", torch.float32, non_blocking=True),
    torch.ones(2).cuda(rank),
    torch.ones(2).pin_memory(),
    torch.nn.Linear(2, 2).cuda().weight,
    torch.nn.Linear(2, 2).to(rank).weight,
    torch.nn.Linear(2, 2, device=device).weight,
):
    assert x.device.type == "cpu", x.device
with device:
    assert torch.ones(1).device.type == "cpu"
model = DDP(torch.nn.Linear(2, 2).to(device), device_ids=[rank], output_device=rank)
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
stream = torch.cuda.Stream()
start.record()
with torch.cuda.stream(stream), torch.autocast("cuda", dtype=torch.bfloat16):
    loss = model(torch.ones(1, 2).cuda()).sum()
    assert torch.cuda.current_stream() is stream
    loss.record_stream(torch.cuda.current_stream())
    torch.cuda._sleep(100)
assert torch.cuda.current_stream() is torch.cuda.default_stream()
assert loss.dtype is torch.bfloat16
with torch.autocast(device_type="cuda"):
    assert model(torch.ones(1, 2).cuda()).dtype is torch.float16
torch.cuda.current_stream().wait_stream(stream)
scaler = torch.amp.GradScaler("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
assert scaler.is_enabled()
end.record()
torch.cuda.synchronize()
assert torch.cuda.memory_stats(device)["allocated_bytes.all.current"] == 0
assert start.elapsed_time(end) >= 0
dist.barrier(device_ids=[rank])
states = [torch.cuda.get_rng_state(), *torch.cuda.get_rng_state_all()]
assert [len(state) for state in states] == [16, 16, 16]
torch.cuda.set_rng_state(states[0])
torch.cuda.default_generators[rank].set_state(states[0])
assert torch.cuda.nccl.version() >= (2, 10)
model.register_comm_hook(None, bf16_compress_hook)
model(torch.ones(1, 2).cuda()).sum().backward()
torch.save(model.state_dict(), f"state{rank}.pt")
torch.load(f"state{rank}.pt", map_location=f"cuda:{rank}")
torch.load(f"state{rank}.pt", map_location={"cuda:0": f"cuda:{rank}"})
with torch.random.fork_rng(devices=range(2)):
    torch.manual_seed(0)
print(torch.cuda.current_device(), torch.cuda.memory_allocated(), torch.cuda.get_device_name())
""",
        cuda_is_cpu=True,
    )
    assert run.failure is None, run.failure
    assert run.output == ("0 0 CPU in the place of a GPU",)
    assert torch.cuda.is_available is before


def test_missing_device_index_is_an_error(launch):
    run = launch("import torch\ntorch.cuda.set_device(2)\n", cuda_is_cpu=True)
    assert "invalid device ordinal: expected below 2" in run.ending


def test_cuda_is_unchanged_by_default(launch):
    run = launch("import torch\nprint(torch.cuda.device_count())\n")
    assert run.output == (str(torch.cuda.device_count()),)


ASKS_FOR_A_RULE = """
import functools
import torch._dynamo
from zero_sim.script.cuda import CudaOnCpu
torch._dynamo.trace_rules.clear_lru_cache()
with CudaOnCpu(device_count=1, rank=lambda: 0).installed():
    torch._dynamo.trace_rules.lookup(functools.reduce)
"""


def test_compiler_rules_are_found_after_a_cache_clear():
    subprocess.run([sys.executable, "-c", ASKS_FOR_A_RULE], check=True)
