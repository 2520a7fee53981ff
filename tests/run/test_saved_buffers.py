"""A checkpoint without the module's buffers resumes with those of a new process."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
import torch.distributed as dist

from zero_sim import run_case
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.targets import Capabilities, Numerics, WholeParamEngine, refusals, settings_of


class Engine(WholeParamEngine):
    """Rank 0 saves everything, optionally without buffers."""

    forgets = False

    def save(self, path, *, form):
        if dist.get_rank(self.group) == 0:
            params = dict(self.module.named_parameters())
            module = params if self.forgets else self.module.state_dict()
            torch.save({"module": module, "optimizer": self.optimizer.state_dict()}, path)
        dist.barrier(self.group)

    def load(self, path, *, weights_only=False):
        saved = torch.load(path)
        self.module.load_state_dict(saved["module"], strict=not self.forgets)
        if not weights_only:
            self.optimizer.load_state_dict(saved["optimizer"])


class Target:
    name = "saving"
    capabilities = Capabilities(stages=(0,), follows=("reload",))
    numerics = Numerics(reported_grads="after-division")

    def __init__(self, *, forgets):
        self.forgets = forgets

    def build(self, module, *, scenario, group):
        optimizer = torch.optim.AdamW(module.parameters(), **settings_of(scenario.optimizer))
        engine = Engine(module, optimizer, group=group)
        engine.forgets = self.forgets
        return engine


def cases(target):
    """First 50 cases drawn for the target."""
    return list(islice(draws(drawn_cases(target), seed=0), 50))


@pytest.fixture(scope="module")
def loading():
    """Drawn cases that load a buffer."""
    return [
        case
        for case in cases(Target(forgets=False))
        if case.reload is not None and case.model.buffer == "saved"
    ]


def test_forgotten_buffers_are_found_within_fifty_cases(loading, pool):
    result = run_case(loading[0], target=Target(forgets=True), pool=pool)
    assert result.findings[0].check == "equality.load"
    assert result.findings[0].param == "gain"


def test_forgotten_buffers_change_the_losses_after_the_load(loading, pool):
    result = run_case(loading[0], target=Target(forgets=True), pool=pool)
    assert "equality.loss" in [each.check for each in result.findings]


def test_saved_buffers_pass(loading, pool):
    verdicts = {run_case(case, target=Target(forgets=False), pool=pool).verdict for case in loading}
    assert verdicts == {"pass"}


def test_rebuilt_buffers_need_no_checkpoint(loading, pool):
    case = replace(loading[0], model=replace(loading[0].model, buffer="rebuilt"))
    assert run_case(case, target=Target(forgets=True), pool=pool).verdict == "pass"


def test_target_can_declare_checkpoints_without_buffers(loading):
    target = Target(forgets=True)
    only = (("model.buffer", ("none", "rebuilt")),)
    target.capabilities = replace(target.capabilities, only=only)
    assert [each.path for each in refusals(target, loading[0])] == ["model.buffer"]
    assert "saved" not in {case.model.buffer for case in cases(target)}
