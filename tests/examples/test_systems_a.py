"""Example systems with their own update rules: correct ones pass, planted faults are found."""

import importlib
import shutil
import sys
from itertools import islice
from pathlib import Path

import pytest
from click.testing import CliRunner

from zero_sim import run_case
from zero_sim.backends.worlds import WorldPool
from zero_sim.cli.main import main
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.testing import conformance

SYSTEMS = Path(__file__).parents[2] / "examples" / "systems"
NAMES = ("owner_adamw", "flat_adamw", "padded_muon", "stacked_muon", "low_bit_adam")
ADAPTER_LINES_MAX = 40

MISTAKES = {
    ("owner_adamw", "the optimizer within never hears of a new learning rate"): (
        'local["lr"] = group["lr"]',
        "pass",
    ),
    ("owner_adamw", "forgets to wait for the gradients"): ("work.wait()", "pass"),
    ("owner_adamw", "weight decay has another sign on rank 1"): (
        "            self.local.step()\n",
        "            self.local.step()\n"
        "            if dist.get_rank() == 1:\n"
        "                for group in self.local.param_groups:\n"
        '                    group["weight_decay"] = -group["weight_decay"]\n',
    ),
    ("flat_adamw", "masters are copied before rank 0 sends its params"): (
        "        for tensor in (self.flat, *buffers):\n",
        "        sent, self.flat = self.flat, self.flat.clone()\n"
        "        for tensor in (sent, *buffers):\n",
    ),
    ("flat_adamw", "clips by the norm of its own shard"): (
        "        dist.all_reduce(total)\n",
        "",
    ),
    ("flat_adamw", "shards are rounded down"): (
        "-(-total // self.world)",
        "max(1, total // self.world)",
    ),
    ("padded_muon", "matrices of the last turn, which is not full, are left out"): (
        "range(0, len(params), world)",
        "range(0, max(1, len(params) // world) * world, world)",
    ),
    ("padded_muon", "params that this rank did not use are not reduced"): (
        "            p.grad = torch.zeros_like(p)\n",
        "            p.grad = torch.zeros_like(p)\n            continue\n",
    ),
    ("stacked_muon", "the sum of gradients, which Muon does not see, is their mean"): (
        "stack, op=dist.ReduceOp.AVG",
        "stack",
    ),
    ("stacked_muon", "steps with the gradients of this rank"): (
        "dist.reduce_scatter_single(grads, stack, op=dist.ReduceOp.AVG)",
        "grads.copy_(stack[first : first + count])",
    ),
    ("low_bit_adam", "params are dealt out in blocks and sent by turns"): (
        "self.params[self.rank :: self.world]",
        "self.params[self.rank * len(self.params) // self.world :]"
        "[: -(-len(self.params) // self.world)]",
    ),
    ("low_bit_adam", "divides while the gradient is on its way"): (
        "            p.grad.div_(self.world)\n            works.append"
        "(dist.reduce(p.grad, dst=index % self.world, async_op=True))\n",
        "            works.append(dist.reduce(p.grad, dst=index % self.world, async_op=True))\n"
        "            p.grad.div_(self.world)\n",
    ),
    ("low_bit_adam", "rank 1 keeps its scales of the first step"): (
        '        state["root_scale"].copy_(scale)\n',
        '        if not dist.is_initialized() or dist.get_rank() != 1 or state["step"] == 1:\n'
        '            state["root_scale"].copy_(scale)\n',
    ),
}
"""Fragment of source and its replacement, by system and mistake."""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Return a function that imports a system and its adapter anew, optionally with an edit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(name, right="", wrong=""):
        for module in (name, f"judge_{name}"):
            shutil.copy(SYSTEMS / f"{module}.py", tmp_path)
            monkeypatch.delitem(sys.modules, module, raising=False)
        source = tmp_path / f"{name}.py"
        assert right in source.read_text()
        if right:
            source.write_text(source.read_text().replace(right, wrong))
        return importlib.import_module(f"judge_{name}").Target()

    yield load
    for module in NAMES:
        sys.modules.pop(module, None)
        sys.modules.pop(f"judge_{module}", None)


@pytest.mark.parametrize("name", NAMES)
def test_system_passes_drawn_cases(name, load):
    conformance(load(name), cases=10)()


@pytest.mark.parametrize("name", NAMES)
def test_system_passes_a_hundred_drawn_cases(name, load):
    conformance(load(name), cases=100, seed=1)()


@pytest.mark.parametrize("name", NAMES)
def test_adapter_is_short(name):
    lines = (SYSTEMS / f"judge_{name}.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) <= ADAPTER_LINES_MAX


def find_first(target, *, cases):
    """Return the number of the first drawn case that fails, counted from 1, and its result."""
    with WorldPool() as pool:
        drawn = draws(drawn_cases(target, ranks_max=6, steps_max=3), seed="0")
        for count, scenario in enumerate(islice(drawn, cases), 1):
            result = run_case(scenario, target=target, pool=pool)
            if result.verdict == "fail":
                return count, result
    return None


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_mistake_is_found_within_fifty_cases(name, mistake, load):
    assert find_first(load(name, *MISTAKES[name, mistake]), cases=50) is not None


CASE = """schema = 1
[model]
name = "mlp"
[world]
size = 2
[system]
stage = 1
[optimizer]
name = "own"
"""


@pytest.mark.parametrize("name", NAMES)
def test_system_is_judged_on_real_processes(name, load, tmp_path):
    load(name)
    (tmp_path / "case.toml").write_text(CASE)
    command = ["run", "case.toml", "--backend", "gloo", "--target", f"judge_{name}:Target"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert "1 passed" in result.output


def test_bundle_of_a_system_is_replayed(load, tmp_path):
    load("stacked_muon", "stack, op=dist.ReduceOp.AVG", "stack")
    (tmp_path / "case.toml").write_text(CASE)
    target = ["--target", "judge_stacked_muon:Target"]
    result = CliRunner().invoke(main, ["run", "case.toml", *target])
    assert result.exit_code == 1, result.output
    (bundle,) = (tmp_path / ".zero-sim" / "bundles").iterdir()
    again = CliRunner().invoke(main, ["replay", bundle.name, *target])
    assert again.exit_code == 1, again.output
    assert "SAME" in again.output.upper()
    load("stacked_muon")
    mended = CliRunner().invoke(main, ["replay", bundle.name, *target])
    assert mended.exit_code == 0, mended.output
    assert mended.output.startswith("FIXED")
