"""Replicas compared among ranks in every run, without a reference run."""

import pytest

from tests.against.conftest import TINY
from zero_sim.against.watch import ScriptWatch
from zero_sim.replicas.shares import shared_rows_note
from zero_sim.script.launch import Launcher, Settings
from zero_sim.script.program import read_script

WRAPPED = """
import contextlib
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(mine, update=True):
    loss_of(model, mine).backward()
    if update:
        optimizer.step()
        optimizer.zero_grad()
"""
LOOP = "for index in range(4):\n    step(rows(index))\n"


@pytest.fixture
def watched(monkeypatch, tmp_path):
    """Run a script to its end on some ranks. Returns the watch with its observations."""

    def run(code, *, ranks=2, allowed=()):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "train.py").write_text(TINY + code)
        script = read_script("train.py", is_module=False, arguments=())
        watch = ScriptWatch(allowed=allowed)
        settings = Settings(ranks_per_node=ranks)
        with Launcher(script, settings, guest=watch) as launcher, watch.watching():
            ended = launcher.run(seed=0, quiet=True)
        assert ended.failure is None, ended.failure.report
        return watch

    return run


def names(drifts):
    return {each.key.name for each in drifts}


def test_replicas_of_a_correct_script_are_equal(watched):
    replicas = watched(WRAPPED + LOOP).replicas
    assert not replicas.findings
    assert not replicas.warnings
    assert {key.name for key in replicas.compared} == {"0.weight", "0.bias", "2.weight", "2.bias"}


# A rank without a usable sample omits its backward.
SKIPS = """
for index in range(8):
    is_last = index % 2 == 1
    usable = (rank, index) not in ((0, 1), (1, 5))
    if {agreed}:
        flag = torch.tensor(int(usable))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        usable = bool(flag)
    if usable:
        with contextlib.nullcontext() if is_last else model.no_sync():
            step(rows(index), update=False)
    elif is_last and {agreed}:
        average()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
"""


def test_micro_batch_skipped_by_one_rank_is_found(watched):
    first = watched(WRAPPED + SKIPS.format(agreed=False)).replicas.findings[0]
    assert first.index.steps == 1
    assert first.ranks == (0, 1)
    assert first.text.startswith("0.weight of DistributedDataParallel, as the first forward after")
    assert "24 of 24 elements differ; element 0: rank 0 has" in first.text


def test_micro_batch_skipped_by_all_ranks_is_accepted(watched):
    replicas = watched(WRAPPED + SKIPS.format(agreed=True)).replicas
    assert not replicas.findings
    assert not replicas.warnings


def test_skips_are_different_unless_all_ranks_agree(judged):
    wrong = judged("train.py", code=WRAPPED + SKIPS.format(agreed=False)).verdict
    assert wrong.outcome == "different"
    assert "Replicas differ: 0.weight" in wrong.reason
    assert "--allow-drift" in wrong.remedy
    right = judged("train.py", code=WRAPPED + SKIPS.format(agreed=True)).verdict
    assert right.outcome == "inconclusive"  # One rank reads other rows.


DRIFTS = {
    "a rank's own learning rate": "optimizer.param_groups[0]['lr'] += rank\n" + LOOP,
    "a rank's own update by hand": """
for index in range(3):
    loss_of(model, rows(index)).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= (0.1 + 0.1 * rank) * p.grad
            p.grad = None
""",
    "a checkpoint that one rank loads": """
step(rows(0))
if rank:
    with torch.no_grad():
        model.module[0].weight.mul_(2)
step(rows(1))
""",
}


@pytest.mark.parametrize("name", DRIFTS)
def test_drifting_params_of_ddp_are_found(watched, name):
    assert watched(WRAPPED + DRIFTS[name]).replicas.findings


ATTENTION = """
net = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_of = lambda model, mine: model(mine).square().mean()
step(rows(0))
with torch.no_grad():
    net[0].self_attn.out_proj.weight.add_({added})
step(rows(1))
"""


def test_params_of_modules_not_called_are_compared(watched):
    replicas = watched(WRAPPED + ATTENTION.format(added=0)).replicas
    assert len(replicas.compared) == 12
    found = watched(WRAPPED + ATTENTION.format(added="rank")).replicas.findings
    assert found[0].key.name == "0.self_attn.out_proj.weight"


def test_tensor_allowed_by_name_may_drift(watched):
    code = WRAPPED + DRIFTS["a checkpoint that one rank loads"]
    assert not watched(code, allowed=["0.*"]).replicas.findings


LOCAL = {
    "the local SGD hook": """
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
groups = [dist.new_group([each]) for each in range(ranks)]
state = local.PostLocalSGDState(None, groups[rank], start_localSGD_iter=1)
model.register_comm_hook(state, local.post_localSGD_hook)
"""
    + LOOP,
    "steps within no_sync on all ranks": "with model.no_sync():\n    "
    + LOOP.replace("\n", "\n    "),
}


@pytest.mark.parametrize("name", LOCAL)
def test_local_sgd_is_a_warning(watched, name):
    replicas = watched(WRAPPED + LOCAL[name]).replicas
    assert not replicas.findings
    assert names(replicas.warnings) >= {"0.weight"}
    assert "This alone is no error, because" in replicas.warning


RIGHT = {
    "ranks with different numbers of batches": """
with model.join():
    for index in range(3 + rank):
        step(torch.ones(2, 4) * index)
step(rows(0))
""",
    "an optimizer that one rank has besides": """
probe = torch.nn.Linear(4, 1)
other = torch.optim.SGD(probe.parameters(), lr=0.1)
for index in range(4):
    if rank == 0:
        probe(rows(index)).sum().backward()
        other.step()
    step(rows(index))
""",
    "averaged weights that one rank swaps in to evaluate": LOOP
    + """
if rank == 0:
    kept = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
        model.module(rows(0))
        for p, old in zip(model.parameters(), kept):
            p.copy_(old)
step(rows(9))
""",
    "batch statistics of each rank": """
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2)), forward_sync_buffers=False
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    + LOOP,
    "a norm whose statistics are broadcast": """
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    + LOOP,
    "a buffer that the outer module changes": """
class Outer(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.inner.register_buffer("count", torch.zeros(2))
    def forward(self, mine):
        self.inner.count += mine.sum(0)[:2].detach()
        return self.inner(mine)
model = DistributedDataParallel(Outer(model.module))
"""
    + LOOP,
    "two models that train by turns, the second with unused params": """
spare = DistributedDataParallel(
    torch.nn.ModuleDict({"used": torch.nn.Linear(4, 2), "unused": torch.nn.Linear(4, 2)}),
    find_unused_parameters=True,
)
spare.module.forward = lambda mine: spare.module["used"](mine)
second = torch.optim.AdamW(spare.parameters())
for index in range(3):
    step(rows(index))
    if index:
        loss_of(spare, rows(index)).backward()
        second.step()
        second.zero_grad()
""",
    "params recomputed in backward": """
from torch.utils.checkpoint import checkpoint
inner = model.module
call = inner[0].forward
inner[0].forward = lambda mine: checkpoint(call, mine, use_reentrant=False)
"""
    + LOOP,
    "a sharded optimizer": """
from torch.distributed.optim import ZeroRedundancyOptimizer
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
"""
    + LOOP,
    "values that are no numbers": "model.module[0].bias.data.fill_(float('nan'))\n" + LOOP,
}


@pytest.mark.parametrize("name", RIGHT)
def test_correct_scripts_have_no_finding_or_warning(watched, name):
    replicas = watched(WRAPPED + RIGHT[name]).replicas
    assert not replicas.findings, replicas.finding
    assert not replicas.warnings, replicas.warning


PLAIN = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for index in range(3):
    loss_of(model, rows(index)).backward()
    {between}
    optimizer.step()
    optimizer.zero_grad()
"""


def test_drift_of_undeclared_equal_tensors_is_a_warning(watched):
    replicas = watched(PLAIN.format(between="pass")).replicas
    assert not replicas.findings
    assert names(replicas.warnings) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert replicas.warnings[0].index.steps == 1


def test_drift_is_noted_with_a_verdict(judged):
    verdict = judged("train.py", code=PLAIN.format(between="pass")).verdict
    assert verdict.outcome == "different"
    assert verdict.notes[-1].startswith("equal on all ranks at first, then not: 0.weight, as the")


def test_tensors_that_differ_initially_are_no_replicas(watched):
    start = "for p in model.parameters():\n    p.data.mul_(1 + rank)\n"
    assert not watched(start + PLAIN.format(between="pass")).replicas.warnings


def test_shards_that_start_with_zeros_are_no_replicas(watched):
    start = (
        "for p in model.parameters():\n    p.data.mul_(rank) if p.dim() > 1 else p.data.zero_()\n"
    )
    assert not watched(start + PLAIN.format(between="pass")).replicas.warnings


PLACED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Replicate, Shard
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        whole = torch.arange(8.0).view(4, 2)
        self.cut = torch.nn.Parameter(distribute_tensor(whole, mesh, [Replicate(), Shard(0)]))
    def forward(self):
        return self.cut.to_local().sum()
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for index in range(3):
    net().backward()
    {between}
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("between", "is_found"), [("pass", False), ("rank == 3 and net.zero_grad()", True)]
)
def test_replicated_placements_are_compared_within_their_shard(watched, between, is_found):
    replicas = watched(PLACED.format(between=between), ranks=4).replicas
    assert bool(replicas.findings) is is_found
    if is_found:
        assert replicas.findings[0].key.declared == "DTensor"
        assert replicas.findings[0].ranks == (1, 3)


HYBRID = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for index in range(3):
    loss_of(model, rows(index)).backward()
    {between}
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("between", "is_found"), [("pass", False), ("rank > 1 and model.zero_grad()", True)]
)
def test_replicas_of_fully_sharded_params_are_compared_unsharded(watched, between, is_found):
    replicas = watched(HYBRID.format(between=between), ranks=4).replicas
    assert bool(replicas.findings) is is_found
    assert not replicas.warnings
    assert is_found or {key.declared for key in replicas.compared} == {"DTensor"}


SAMPLED = """
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
data = TensorDataset(torch.randn(32, 4))
sampler = DistributedSampler(data, num_replicas=ranks, rank=rank, seed={seed})
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (mine,) in DataLoader(data, batch_size=8 // ranks, sampler=sampler):
        step(mine)
"""


def noted(watch):
    return shared_rows_note(list(watch.rows.values()))


def test_rows_of_samplers_with_different_seeds_are_noted(watched):
    assert not noted(watched(WRAPPED + SAMPLED.format(seed=3)))
    note = noted(watched(WRAPPED + SAMPLED.format(seed="3 + rank")))
    assert "in pass 1 over the data" in note
    assert "were read by several ranks" in note


def test_rows_read_by_all_ranks_are_not_noted(watched):
    assert not noted(watched(WRAPPED + LOOP.replace("rows(index)", "torch.eye(4) + index")))


def test_rows_read_by_pairs_of_ranks_are_not_noted(watched):
    code = WRAPPED + LOOP.replace("rows(index)", "torch.eye(4) + rank // 2")
    assert not noted(watched(code, ranks=4))


def test_rows_of_samplers_with_different_seeds_are_different(judged):
    assert judged("train.py", code=WRAPPED + SAMPLED.format(seed=3)).verdict.outcome == "equal"
    wrong = judged("train.py", code=WRAPPED + SAMPLED.format(seed="3 + rank")).verdict
    assert wrong.outcome == "different"
    assert "Rows are dealt wrongly: in pass 1 over the data" in wrong.reason


def test_rows_of_rank_0_on_all_ranks_are_different(judged):
    code = WRAPPED + LOOP.replace("rows(index)", "torch.randn(8, 4).chunk(ranks)[0]")
    verdict = judged("train.py", code=code).verdict
    assert verdict.outcome == "different"
    assert "in step 1 4 of 8 rows" in verdict.reason
    assert "by several ranks and 4 by none" in verdict.reason


def test_rows_read_by_all_ranks_are_inconclusive(judged):
    code = WRAPPED + LOOP.replace("rows(index)", "torch.randn(8, 4)")
    verdict = judged("train.py", code=code).verdict
    assert verdict.outcome == "inconclusive"  # Ranks of tensor parallelism read the same rows, too.
    assert "every rank read every row" in verdict.reason


def test_rows_repeated_to_fill_the_last_batch_are_inconclusive(judged):
    code = SAMPLED.format(seed=3).replace("randn(32, 4)", "randn(31, 4)")
    assert judged("train.py", code=WRAPPED + code).verdict.outcome == "inconclusive"


COMPILED = """
fast = torch.compile(model.module, backend="eager", fullgraph=True)
for index in range(3):
    loss_of(fast, rows(index)).backward()
    average()
    optimizer.step()
    optimizer.zero_grad()
step(rows(9))
"""


def test_compiled_module_is_not_hooked(watched):
    assert watched(WRAPPED + COMPILED).replicas.compared
