"""Example systems modelled on known ones, each with an adapter of at most 40 lines."""

from __future__ import annotations

import importlib
import os
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch.distributed as dist
from click.testing import CliRunner
from torch.distributed.tensor import DTensor, Replicate, Shard

from zero_sim import run_case
from zero_sim.cli.main import main
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.testing import conformance

SYSTEMS = Path(__file__).parents[2] / "examples" / "systems"
sys.path.insert(0, str(SYSTEMS))

import dion  # noqa: E402
import hooked  # noqa: E402
import ring  # noqa: E402
import shampoo  # noqa: E402
import wrapped  # noqa: E402

NAMES = ("dion", "hooked", "ring", "wrapped", "shampoo")
WITHIN = 50


class ScaledStart(dion.Dion):
    """Power iterations start from a different matrix on each owner."""

    def update(self, param, state, settings):
        started = "q" in state
        super().update(param, state, settings)
        if self.group is not None and not started and "q" in state:
            state["q"].mul_(1 + self.group.rank())


class MatricesSent(dion.Dion):
    """Vectors have owners, too, but are not sent."""

    def send(self, owners):
        super().send({param: owner for param, owner in owners.items() if param.ndim > 1})


class InPlace(hooked.HookedDataParallel):
    """The hook writes the mean into its argument."""

    def average(self, grad):
        dist.all_reduce(grad, group=self.group)
        grad /= self.group.size()


class AveragesSoFar(hooked.HookedDataParallel):
    """The hook averages the accumulated gradient, including earlier micro-batches."""

    def __init__(self, module, group):
        super().__init__(module, group)
        self.remove_hooks()
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(self.average_all)

    def average_all(self, param):
        param.grad.copy_(self.average(param.grad))


class LastTurnMissing(ring.Ring):
    """With more than two ranks, each keeps its own part of the chunk that comes last."""

    def all_reduce(self, flat):
        chunk = flat.chunk(self.size)[(self.rank + 2) % self.size]
        own = chunk.clone()
        super().all_reduce(flat)
        if self.size > 2:
            chunk.copy_(own)


class NotReceived(ring.Ring):
    """Waits for its send, but not for its receive."""

    def exchange(self, sent, received):
        sending = dist.isend(sent, self.next, group=self.group)
        dist.irecv(received, self.previous, group=self.group)
        sending.wait()


class Undivided(wrapped.Gather):
    """Backward returns the sum over the ranks."""

    @staticmethod
    def backward(ctx, grad):
        shard, none = super(Undivided, Undivided).backward(ctx, grad)
        return shard * ctx.group.size(), none


class GatheredOnce(wrapped.Sharded):
    """Forward uses the unsharded params of the first step."""

    def views(self, flat):
        if not flat.requires_grad:
            return super().views(flat)
        vars(self).setdefault("kept", flat.detach())
        return super().views(self.kept + (flat - flat.detach()))


class Replicated(shampoo.Shampoo):
    """Gradients are declared replicated, not partial sums."""

    def average_gradients(self):
        for settings in self.param_groups:
            for param in settings["params"]:
                same = DTensor.from_local(param.grad, self.mesh, [Replicate()])
                param.grad = same.full_tensor()


class FirstRows(shampoo.Shampoo):
    """Every rank keeps the first rows of a factor instead of its own."""

    def scattered(self, factor):
        right = super().scattered(factor)
        if self.mesh is None:
            return right
        rows = factor[: len(right.to_local())].clone()
        placed = {"shape": factor.shape, "stride": factor.stride()}
        return DTensor.from_local(rows, self.mesh, [Shard(0)], **placed)


BUGS = {
    ScaledStart: ("judge_dion.Dion", "equality.state"),
    MatricesSent: ("judge_dion.Dion", "equality.params"),
    InPlace: ("judge_hooked.HookedDataParallel", "equality.grad"),
    AveragesSoFar: ("judge_hooked.HookedDataParallel", "equality.grad"),
    LastTurnMissing: ("ring.Ring", "equality.grad"),
    # A race or a call without wait(), depending on the drawn case.
    NotReceived: ("ring.Ring", "world."),
    Undivided: ("wrapped.Gather", "equality.grad"),
    GatheredOnce: ("wrapped.Sharded", "equality.params"),
    Replicated: ("judge_shampoo.Shampoo", "equality.grad"),
    FirstRows: ("judge_shampoo.Shampoo", "equality.state"),
}
"""Replaced class and first check that finds the bug, by bug."""


def target_of(name):
    return importlib.import_module(f"judge_{name}").Target()


def first_failure(target):
    """Return the result of the first drawn case that fails."""
    drawn = drawn_cases(target, ranks_max=6, steps_max=3)
    cases = islice(draws(drawn, seed="0"), WITHIN)
    results = (run_case(scenario, target=target) for scenario in cases)
    return next((result for result in results if result.verdict == "fail"), None)


@pytest.mark.parametrize("name", NAMES)
def test_right_system_passes(name):
    conformance(target_of(name), cases=10)()


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_found(monkeypatch, bug):
    target, (place, check) = target_of(bug.__bases__[0].__module__), BUGS[bug]
    monkeypatch.setattr(place, bug)
    result = first_failure(target)
    assert result is not None
    assert result.findings[0].check.value.startswith(check)


@pytest.mark.parametrize("name", NAMES)
def test_adapter_has_at_most_40_lines(name):
    assert len((SYSTEMS / f"judge_{name}.py").read_text().splitlines()) <= 40


@pytest.mark.parametrize("name", NAMES)
def test_right_system_passes_in_100_cases(name):
    conformance(target_of(name), cases=100)()


CASE = """schema = 1
[model]
name = "params"
shapes = [[3, 2], [5], [5], []]
[world]
size = 3
{world}
[system]
stage = {stage}
[optimizer]
name = "{optimizer}"
[run]
steps = 2
micro_batches = 2
"""
SETTINGS = {
    "dion": {"world": "", "stage": 1, "optimizer": "own"},
    "hooked": {"world": "", "stage": 0, "optimizer": "adamw"},
    "ring": {"world": "order_known = false", "stage": 0, "optimizer": "adamw"},
    "wrapped": {"world": "", "stage": 3, "optimizer": "adamw"},
    "shampoo": {"world": "", "stage": 0, "optimizer": "own"},
}


@pytest.mark.parametrize("name", NAMES)
def test_right_system_passes_on_real_processes(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(SYSTEMS), prepend=os.pathsep)
    Path("case.toml").write_text(CASE.format(**SETTINGS[name]))
    command = ["run", "case.toml", "--backend", "gloo", "--target", f"judge_{name}:Target"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output


def test_bundle_of_a_planted_bug_is_replayed(tmp_path, monkeypatch):
    """The finding is the same with the bug, and fixed without it."""
    monkeypatch.chdir(tmp_path)
    Path("case.toml").write_text(CASE.format(**SETTINGS["dion"]))
    with monkeypatch.context() as planted:
        planted.setattr("judge_dion.Dion", MatricesSent)
        run = CliRunner().invoke(main, ["run", "case.toml", "--target", "judge_dion:Target"])
        assert run.exit_code == 1, run.output
        (bundle,) = Path(".zero-sim/bundles").iterdir()
        command = ["replay", str(bundle), "--target", "judge_dion:Target"]
        again = CliRunner().invoke(main, command)
        assert again.exit_code == 1, again.output
    fixed = CliRunner().invoke(main, command)
    assert fixed.exit_code == 0, fixed.output
    assert "FIXED" in fixed.output
