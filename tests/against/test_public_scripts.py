"""Habits of public training scripts, each of which once prevented a correct verdict."""

import pytest
import torch
from torch import nn

from zero_sim.against import native_dtypes
from zero_sim.against.native_dtypes import stored
from zero_sim.against.wide_operations import WideOperations

LOOP = """
from torch.nn.parallel import DistributedDataParallel as DDP
wrapped = DDP(model) if ranks > 1 else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    mine = {rows}
    (wrapped(mine) - mine[:, :2].sin()).square().mean().backward()
    optimizer.step()
"""
OWN_BATCH = "torch.randn(8, 4, generator=torch.Generator().manual_seed(step * 9 + rank))"
OWN_LOSS = LOOP.replace("(wrapped(mine) - mine[:, :2].sin())", "wrapped(mine)")


def test_batch_that_cannot_be_set_is_split_among_ranks(judged):
    code = OWN_LOSS.format(rows=OWN_BATCH)
    assert judged("train.py", code=code).verdict.outcome == "inconclusive"
    assert judged("train.py", code=code, feeds=True).verdict.outcome == "equal"


def test_wrong_reduction_of_a_split_batch_is_different(judged):
    code = OWN_LOSS.format(rows=OWN_BATCH).replace(
        "    optimizer.step()", "    model[0].weight.grad *= ranks\n    optimizer.step()"
    )
    assert judged("train.py", code=code, feeds=True).verdict.outcome == "different"


def test_batch_that_ranks_cannot_share_is_inconclusive(judged):
    code = OWN_LOSS.format(rows=OWN_BATCH.replace("8, 4", "7, 4"))
    verdict = judged("train.py", code=code, feeds=True).verdict
    assert verdict.outcome == "inconclusive"
    assert "cannot be dealt" in verdict.reason


def test_steps_without_rows_for_ranks_are_omitted(judged):
    code = OWN_LOSS.format(rows=OWN_BATCH).replace("range(3)", "range(4 // ranks)")
    verdict = judged("train.py", code=code, feeds=True).verdict
    assert verdict.outcome == "equal"
    wrong = code.replace(
        "    optimizer.step()", "    model[0].bias.grad *= ranks\n    optimizer.step()"
    )
    assert judged("train.py", code=wrong, feeds=True).verdict.outcome == "different"


def test_uninitialised_memory_is_named(judged):
    code = "model[0].bias.data = torch.empty(6)\n" + LOOP.format(rows="rows(step)")
    verdict = judged("train.py", code=code).verdict
    assert verdict.outcome == "different"
    assert "computes with memory that was never filled" in verdict.reason
    assert "First at step 1, param as forward used it: 0.bias" in verdict.reason


def test_loss_of_other_validation_rows_is_no_difference(judged):
    code = LOOP.format(rows="rows(step)") + (
        "model.eval()\n"
        "with torch.no_grad():\n"
        "    other = torch.randn(5, 4, generator=torch.Generator().manual_seed(ranks))\n"
        "    loss = model(other).square().mean()\n"
        "if rank == 0:\n    torch.save({'model': model.state_dict(), 'loss': loss}, 'last.pt')\n"
    )
    verdict = judged("train.py", code=code).verdict
    assert verdict.outcome == "equal"
    assert any(name.endswith("loss") for name in verdict.unobserved)


def test_different_starts_of_all_ranks_are_inconclusive(judged):
    code = "torch.manual_seed(ranks)\nmodel[0] = torch.nn.Linear(4, 6)\n"
    code += LOOP.format(rows="rows(step)")
    verdict = judged("train.py", code=code).verdict
    assert verdict.outcome == "inconclusive"
    assert "--start-of-one" in verdict.remedy
    assert judged("train.py", code=code, starts_alike=True).verdict.outcome == "equal"


def test_different_start_of_one_rank_is_different(judged):
    code = "torch.manual_seed(rank)\nmodel[0] = torch.nn.Linear(4, 6)\n"
    code += LOOP.format(rows="rows(step)").replace("DDP(model) if ranks > 1 else model", "model")
    code = code.replace("    optimizer.step()", "    average()\n    optimizer.step()")
    assert judged("train.py", code=code).verdict.outcome == "different"


def test_different_params_under_one_name_are_inconclusive(judged):
    code = "torch.manual_seed(rank)\nmodel = torch.nn.Sequential(*model[:3 // ranks + 1])\n"
    code += "model.append(torch.nn.Linear(6, 2)) if ranks > 1 else None\n"
    verdict = judged("train.py", code=code + LOOP.format(rows="rows(step)")).verdict
    assert verdict.outcome == "inconclusive"


def test_ranks_that_share_each_row_need_all_read_all(judged):
    code = LOOP.format(rows="torch.arange(32.0).sin().view(8, 4) * (step + 1)")
    verdict = judged("train.py", code=code).verdict
    assert verdict.outcome == "inconclusive"
    assert "--all-read-all" in verdict.remedy
    assert judged("train.py", code=code, all_read_all=True).verdict.outcome == "equal"


def test_module_wrapped_only_on_several_ranks_keeps_its_name(judged):
    verdict = judged("train.py", code=LOOP.format(rows="rows(step)")).verdict
    assert verdict.outcome == "equal"


def test_gpus_of_all_ranks_are_visible_to_the_run_on_one(judged):
    code = "if torch.accelerator.device_count() < 2: sys.exit()\n"
    code += "model = model.to(rank)\ntorch.ones(2).to(rank)\n" + LOOP.format(rows="rows(step)")
    assert judged("train.py", code=code, cuda_is_cpu=True).verdict.outcome == "equal"


SLOT = """
class Owned(torch.optim.SGD):
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("average", torch.zeros_like(p))
                if rank == 0:
                    buffer.mul_(0.9).add_(p.grad)
                    p.data -= 0.1 * buffer
                {after}
optimizer = Owned(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    loss_of(model, rows(step)).backward()
    average()
    optimizer.step()
torch.save(optimizer.state_dict(), f"{{rank}}.pt")
"""


@pytest.mark.parametrize(
    ("after", "outcome"), [("dist.broadcast(p.data, 0)", "equal"), ("pass", "different")]
)
def test_empty_state_on_a_non_owner_is_no_difference(judged, after, outcome):
    assert judged("train.py", code=SLOT.format(after=after)).verdict.outcome == outcome


def test_zero_gradients_prove_nothing(judged):
    code = LOOP.format(rows="rows(step)").replace(".mean().backward()", ".mean().mul(0).backward()")
    verdict = judged("train.py", code=code).verdict
    assert verdict.outcome == "inconclusive"
    assert "Every gradient is zero" in verdict.reason


def test_params_of_another_thread_are_widened():
    model = nn.Linear(4, 2)
    with native_dtypes.installed(), WideOperations(counts=lambda: True):
        assert stored(model.weight) is torch.float32
        params = dict(model.named_parameters())
        assert stored(params["weight"]) is torch.float64
        assert params["weight"].dtype is torch.float32
        model(torch.ones(3, 4)).sum().backward()
        assert stored(model.weight.grad) is torch.float64


def test_sparse_gradient_has_the_dtype_of_its_param():
    with native_dtypes.installed(), WideOperations(counts=lambda: True):
        table = nn.EmbeddingBag(5, 3, sparse=True, mode="sum")
        table(torch.tensor([[1, 2]])).sum().backward()
        assert table.weight.grad.is_sparse
        assert table.weight.grad.dtype is torch.float32
        torch.optim.SGD(table.parameters(), lr=0.1).step()


def test_bytes_of_a_file_are_read_as_floats():
    content = torch.tensor([1.5, -2.0]).numpy().tobytes()
    with native_dtypes.installed(), WideOperations(counts=lambda: True):
        values = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(torch.float32)
        assert values.dtype is torch.float32
        assert stored(values) is torch.float64
        assert values.tolist() == [1.5, -2.0]


TAUGHT = """
import copy
from torch.nn.parallel import DistributedDataParallel as DDP
teacher = copy.deepcopy(model)
wrapped = DDP(model) if ranks > 1 else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    mine = {rows}
    with torch.no_grad():
        aim = 2 * teacher({taught})
    (wrapped(mine) - aim).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("taught", ["mine", "torch.ones(1, 4)"])
def test_rows_of_a_teacher_are_not_compared(judged, taught):
    code = TAUGHT.format(rows="rows(step)", taught=taught)
    assert judged("train.py", code=code).verdict.outcome == "equal"


def test_teacher_gets_the_rows_of_its_student(judged):
    code = TAUGHT.format(rows=OWN_BATCH, taught="mine")
    assert judged("train.py", code=code, feeds=True).verdict.outcome == "equal"


@pytest.mark.parametrize("setting", [("offload=0", "reshard=1"), ("offload=1", "reshard=0")])
@pytest.mark.parametrize("ranks", [2, 4])
def test_params_unsharded_before_forward_start_as_on_one_rank(judged, setting, ranks):
    verdict = judged("fsdp2_unshard.py", *setting, ranks=ranks, starts_alike=True).verdict
    assert verdict.outcome == "equal"
    wrong = judged("fsdp2_unshard.py", "fault=shard", *setting, one=setting, starts_alike=True)
    assert wrong.verdict.outcome == "different"


def test_different_start_of_meta_params_is_not_rounding(judged):
    verdict = judged("fsdp2_unshard.py", one=()).verdict
    assert "different random numbers" in verdict.reason
