"""Targets with their own optimizer resume in other worlds and after lost steps."""

from dataclasses import replace

import pytest
import torch

from tests.run.test_own_rule import CASE, WithSigmoid
from tests.targets.own_adamw import ByOptimizer, ByStep, Engine
from zero_sim import run_case
from zero_sim.scenario.spec import ReloadSpec, RunSpec

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

RELOADS = {
    "plain": ReloadSpec(step=1),
    "larger": ReloadSpec(step=2, world_size=4),
    "smaller": ReloadSpec(step=2, world_size=2),
    "weights": ReloadSpec(step=2, world_size=2, weights_only=True),
    "lost": ReloadSpec(step=2, lost_steps=1, lost_micro_batches=1, early_save=True),
    "lost weights": ReloadSpec(step=2, lost_steps=2, weights_only=True),
}


class SavingEngine(Engine):
    """Saves a shard per rank; every rank loads all shards."""

    def save(self, path, *, form):
        path.mkdir(exist_ok=True)
        saved = {"shard": self.shard, "state": self.state}
        torch.save(saved, path / f"{self.group.rank()}-of-{self.group.size()}.pt")
        torch.distributed.barrier(self.group)

    def load(self, path, *, weights_only=False):
        files = sorted(path.iterdir(), key=lambda each: int(each.name.split("-")[0]))
        saved = [torch.load(each) for each in files]
        flat = torch.cat([each["shard"] for each in saved])
        self.shard = self.cut(flat).clone()
        start = 0
        for param in self.named.values():
            param.data.copy_(flat[start : start + param.numel()].view_as(param))
            start += param.numel()
        self.zero_grad()
        self.grad = None
        if self.target.mistake == "state stays":
            return
        self.state = {} if weights_only else dict(saved[0]["state"])
        for key, value in self.state.items():
            if value.dim():
                whole = torch.cat([each["state"][key] for each in saved])
                self.state[key] = self.cut(whole).clone()
        if self.target.mistake == "count restarts" and self.state:
            self.state["step"] = torch.tensor(0.0)


def saving(target, mistake=""):
    """Return the target with checkpoints."""
    able = target.capabilities
    able = replace(able, follows=(*able.follows, "reload"), only=(("reload.form", ("sharded",)),))

    def build(self, module, *, scenario, group):
        return SavingEngine(self, module, scenario, group)

    made = type("Saving", (target,), {"build": build, "capabilities": able})()
    made.mistake = mistake
    return made


def case(reload):
    return replace(CASE, run=RunSpec(steps=4, micro_batches=2), reload=RELOADS[reload])


@pytest.mark.parametrize("target", [ByStep, ByOptimizer, WithSigmoid])
@pytest.mark.parametrize("reload", RELOADS)
def test_right_optimizer_resumes(target, reload):
    result = run_case(case(reload), target=saving(target))
    assert (result.verdict, result.findings, result.error) == ("pass", (), "")


@pytest.mark.parametrize(
    ("mistake", "reload"),
    [("state stays", "larger"), ("state stays", "lost weights"), ("count restarts", "plain")],
)
def test_state_that_is_not_restored_is_found(mistake, reload):
    result = run_case(case(reload), target=saving(ByStep, mistake))
    assert result.verdict == "fail"
    assert result.findings[0].check in {"equality.load", "equality.state", "equality.master"}
