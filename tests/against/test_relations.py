"""Comparisons with equal numbers of ranks: resumed runs and other layouts."""

import pytest

RESUMED = """
stop, fault = int(sys.argv[1]), sys.argv[2]
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
start = 0
if os.path.exists("saved.pt"):
    saved = torch.load("saved.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"]
    for state in optimizer.state.values():
        if fault == "steps-lost":
            state["step"].zero_()
        if fault == "steps-lost-on-a-rank" and rank:
            state["step"].zero_()
for step in range(start, stop):
    optimizer.zero_grad()
    loss_of(model, rows(step + (start if fault == "other-rows" else 0))).backward()
    average()
    optimizer.step()
    if step == 1 and rank == 0:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**states, "step": 2}, "saved.pt")
"""


@pytest.mark.parametrize("stop", ["2", "3"])
def test_resumed_run_is_equal_after_any_stop(judged, stop):
    comparison = judged("train.py", "4", "", code=RESUMED, ranks=2, one_ranks=2, stopped=(stop, ""))
    assert comparison.verdict.outcome == "equal"
    assert comparison.verdict.steps == 4


@pytest.mark.parametrize("fault", ["steps-lost", "steps-lost-on-a-rank"])
def test_lost_step_counter_is_different(judged, fault):
    verdict = judged(
        "train.py", "4", fault, code=RESUMED, ranks=2, one_ranks=2, stopped=("2", fault)
    ).verdict
    assert verdict.outcome == "different"
    assert verdict.differences[0].point.text.startswith("step 3, optimizer state")
    assert verdict.differences[0].point.name.endswith(":step")


def test_steps_lost_on_any_number_of_ranks_are_equal(judged):
    comparison = judged("train.py", "4", "steps-lost", code=RESUMED)
    assert comparison.verdict.outcome == "equal"


def test_other_rows_after_resumption_are_inconclusive(judged):
    stopped = ("2", "other-rows")
    verdict = judged(
        "train.py", "4", "other-rows", code=RESUMED, ranks=2, one_ranks=2, stopped=stopped
    ).verdict
    assert verdict.outcome == "inconclusive"
    assert "in step 3" in verdict.reason


SHARDED_STATE = """
stop, fault = int(sys.argv[1]), sys.argv[2]
weights = list(model.parameters())
flat = torch.cat([p.detach().flatten() for p in weights])
flat = torch.cat([flat, torch.zeros(-len(flat) % ranks)])
own = flat.chunk(ranks)[rank].clone().requires_grad_()
optimizer = torch.optim.Adam([own], lr=0.1)
start = 0
if os.path.exists(f"saved{rank}.pt"):
    saved = torch.load(f"saved{rank}.pt")
    own.data.copy_(saved["own"])
    optimizer.load_state_dict(saved["optimizer"])
    start = 2
    if fault == "moments-lost-on-a-rank" and rank:
        optimizer.state[own]["exp_avg_sq"].zero_()
def spread():
    full = torch.empty(len(flat))
    dist.all_gather_into_tensor(full, own.detach())
    sizes = [p.numel() for p in weights]
    for p, values in zip(weights, full.split([*sizes, len(full) - sum(sizes)])):
        p.data.copy_(values.view_as(p))
spread()
for step in range(start, stop):
    loss_of(model, rows(step)).backward()
    average()
    grads = torch.cat([p.grad.flatten() for p in weights])
    own.grad = torch.cat([grads, torch.zeros(len(flat) - len(grads))]).chunk(ranks)[rank]
    for p in weights:
        p.grad = None
    optimizer.step()
    spread()
    if step == 1:
        torch.save({"own": own.detach(), "optimizer": optimizer.state_dict()}, f"saved{rank}.pt")
"""


@pytest.mark.parametrize(
    ("fault", "expected"), [("", "equal"), ("moments-lost-on-a-rank", "different")]
)
def test_parts_are_compared_by_rank_after_resumption(judged, fault, expected):
    verdict = judged(
        "train.py", "4", fault, code=SHARDED_STATE, ranks=2, one_ranks=2, stopped=("2", fault)
    ).verdict
    assert verdict.outcome == expected, verdict
    assert verdict.unobserved == verdict.undecided == ()


LAYOUT = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
tp, fault = int(sys.argv[1]), sys.argv[2]
mesh = init_device_mesh("cpu", (ranks // tp, tp), mesh_dim_names=("dp", "tp"))
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
parallelize_module(model, mesh["tp"], plan)
if fault != "not-reduced":
    fully_shard(model, mesh=mesh["dp"])
if fault == "shard-scaled" and mesh.get_local_rank("tp") == 1:
    model[0].weight.to_local().data.mul_(1 + 1e-6)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for step in range(3):
    draws = torch.Generator().manual_seed(100 + step)
    mine = torch.randn(8, 4, generator=draws).chunk(ranks // tp)[mesh.get_local_rank("dp")]
    optimizer.zero_grad()
    loss_of(model, mine).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("fault", "expected"),
    [("", "equal"), ("shard-scaled", "different"), ("not-reduced", "different")],
)
def test_tensor_parallel_layout_is_compared_with_a_data_parallel_one(judged, fault, expected):
    verdict = judged(
        "train.py", "2", fault, code=LAYOUT, ranks=4, one=("1", ""), one_ranks=4
    ).verdict
    assert verdict.outcome == expected, verdict
    assert verdict.unobserved == verdict.undecided == ()


def test_ranks_that_share_a_forward_read_the_same_rows(judged):
    assert (
        judged("train.py", "2", "", code=LAYOUT, ranks=4, one=("1", "")).verdict.outcome == "equal"
    )


def test_same_rows_without_a_shared_forward_are_inconclusive(judged):
    code = LAYOUT.replace('mesh.get_local_rank("dp")', "0")
    verdict = judged("train.py", "2", "", code=code, ranks=4, one=("1", "")).verdict
    assert verdict.outcome == "inconclusive"


FLAT = """
from torch.distributed.fsdp import FullyShardedDataParallel
fault, original = sys.argv[1:]
cpu = torch.device("cpu")
model = FullyShardedDataParallel(model, use_orig_params=original == "1", device_id=cpu)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    loss_of(model, rows(step)).backward()
    if fault == "state" and rank == 1 and step == 1:
        next(iter(optimizer.state.values()))["exp_avg"].mul_(1 + 1e-6)
    optimizer.step()
"""


@pytest.mark.parametrize("original", ["0", "1"])
@pytest.mark.parametrize(("fault", "expected"), [("", "equal"), ("state", "different")])
def test_parts_of_flat_params_are_joined(judged, original, fault, expected):
    verdict = judged("train.py", fault, original, code=FLAT, ranks=8, one=("", original)).verdict
    assert verdict.outcome == expected, verdict
    assert verdict.unobserved == verdict.undecided == ()
