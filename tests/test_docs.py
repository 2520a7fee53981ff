"""Pages in docs/: the fields, checks, forms, jobs and examples on them exist and work."""

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import click
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from tests.transcripts import assert_shown, blocks, run_command, transcripts
from zero_sim import World, run_case, targets
from zero_sim.cli.main import main
from zero_sim.reference import CLIP_FORMS, LossRows, ScaleLoss
from zero_sim.report.explain import explain
from zero_sim.scenario import spec
from zero_sim.scenario.spec import ModelSpec, OptimizerSpec, RunSpec, Scenario, WorldSpec
from zero_sim.targets import Capabilities, Costs, Numerics, Place

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
COMPARED = (DOCS / "what-is-compared.md").read_text()
TARGETS = "\n".join(
    (DOCS / f"{name}.md").read_text() for name in ("targets", "target-reference", "target-examples")
)
CI = (DOCS / "ci.md").read_text()
RANKS = (DOCS / "tests-on-ranks.md").read_text()

TABLES = {
    "model": spec.ModelSpec,
    "data": spec.DataSpec,
    "world": spec.WorldSpec,
    "topology": spec.TopologySpec,
    "system": spec.SystemSpec,
    "optimizer": spec.OptimizerSpec,
    "run": spec.RunSpec,
    "reload": spec.ReloadSpec,
    "faults": spec.FaultSpec,
}


@pytest.mark.parametrize("table", TABLES)
def test_listed_features_are_the_fields_of_each_table(table):
    (row,) = re.findall(rf"^\| `{table}` \| (.*) \|$", COMPARED, flags=re.MULTILINE)
    fields = {field.name for field in dataclasses.fields(TABLES[table])}
    assert set(re.findall(r"`(\w+)`", row)) == fields - ({"target"} if table == "system" else set())


def test_model_and_optimizer_counts_are_correct():
    counts = [int(n) for n in re.findall(r"`name` \((\d+) ", COMPARED)]
    assert counts == [len(get_args(spec.ModelName)), len(get_args(spec.OptimizerName))]


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda path: path.stem)
def test_every_check_on_a_page_exists(page):
    for check in re.findall(
        r"`((?:equality|invariant|guard|world|input)\.[a-z-]+)`", page.read_text()
    ):
        name = check.partition(".")[2].replace("-", "_")
        # Attributes of a World, and fields of `[world]`, look like checks.
        if not hasattr(World, name) and name not in {
            field.name for field in dataclasses.fields(spec.WorldSpec)
        }:
            assert explain(check), check


@pytest.mark.parametrize("record", [Capabilities, Costs, Numerics, Place], ids=lambda r: r.__name__)
def test_every_declarable_field_is_documented(record):
    missing = [f.name for f in dataclasses.fields(record) if f"`{f.name}`" not in TARGETS]
    assert not missing


def test_documented_clip_forms_exist():
    named = set(re.findall(r"`(fp(?:32|64)-[a-z-]+)`", TARGETS))
    assert named
    assert named <= set(CLIP_FORMS)
    assert f"{_in_words(len(CLIP_FORMS))} forms" in TARGETS


def _in_words(count):
    return {16: "sixteen"}[count]


JOBS = dict(
    zip(("github", "gitlab"), re.findall(r"```yaml\n(.*?)```", CI, flags=re.DOTALL), strict=True)
)
SCHEMAS = {"github": "vendor.github-workflows", "gitlab": "vendor.gitlab-ci"}


@pytest.mark.parametrize("service", JOBS)
def test_job_fits_the_schema_of_its_service(service, tmp_path):
    pytest.importorskip("check_jsonschema")
    path = tmp_path / "job.yml"
    path.write_text(JOBS[service])
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", SCHEMAS[service]]
    if service == "gitlab":
        command += ["--data-transform", "gitlab-ci"]
    done = subprocess.run([*command, "-o", "json", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, json.dumps(done.stdout) + done.stderr


@pytest.mark.parametrize("service", JOBS)
def test_commands_and_options_of_a_job_exist(service):
    lines = re.findall(r"zero-sim (\w+)((?: [^\s|']+)*)", JOBS[service])
    lines = [(name, words.split()) for name, words in lines if name in main.commands]
    assert {name for name, _ in lines} == {"run", "fuzz", "report"}
    for name, words in lines:
        options = {
            option
            for param in main.commands[name].params
            if isinstance(param, click.Option)
            for option in param.opts
        }
        assert {word for word in words if word.startswith("--")} <= options


SCRIPTS = (DOCS / "scripts.md").read_text()


def test_every_torchrun_option_on_the_page_exists():
    options = {option for param in main.commands["torchrun"].params for option in param.opts}
    # `--steps` is the script's.
    assert set(re.findall(r"--[a-z][a-z-]+", SCRIPTS)) - {"--steps"} <= options


def test_script_of_the_page_runs_by_its_commands(tmp_path, monkeypatch):
    # Skip the command for a third-party package.
    commands = [
        line
        for line in re.findall(r"^zero-sim (torchrun .*)", SCRIPTS, flags=re.MULTILINE)
        if "accelerate" not in line
    ]
    (script,) = re.findall(r"```python\n(.*?)```", SCRIPTS, flags=re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    assert len(commands) == 2
    for command in commands:
        done = CliRunner().invoke(main, command.split())
        assert done.exit_code == 0, done.output
        assert "step 1 loss" in done.output


# Slow, because the script runs ten times.
def test_tutorial_output_is_as_documented(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "your-script.md").read_text()
    script, change = blocks(page, "python")
    mended = script.replace("            dist.all_reduce(param.grad)\n", change)
    assert mended != script
    for text, (command, shown) in zip((script, mended), transcripts(page), strict=True):
        Path("train.py").write_text(text)
        assert_shown(shown, run_command(command))


# Slower than a quarter of a second: the script runs fifteen times.
def test_other_relations_output_is_as_documented(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "against.md").read_text()
    (script,) = blocks(page, "python")
    Path("train.py").write_text(script)
    for command, shown in transcripts(page):
        assert_shown(shown, run_command(command))


def test_documented_finding_is_reproduced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "reading-a-finding.md").read_text()
    (case,) = blocks(page, "toml")
    Path("flipped.toml").write_text(case)
    ((command, shown),) = transcripts(page)
    assert_shown(shown, run_command(command))
    run_command("report")
    assert "equality.grad" in Path("zero-sim.html").read_text()


def test_options_on_the_reporting_page_exist():
    page = (DOCS / "reporting-upstream.md").read_text()
    lines = re.findall(r"(?:^|`)zero-sim ([^`\n]+)", page, flags=re.MULTILINE)
    assert len(lines) == 3
    for name, *words in map(str.split, lines):
        options = {option for param in main.commands[name].params for option in param.opts}
        assert {word for word in words if word.startswith("--")} <= options


def test_example_of_all_schedules_runs():
    (page,) = [each for each in _python(RANKS) if "import explore" in each]
    exec(compile(page, "tests-on-ranks.md", "exec"), {})


def _python(page):
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)


class FlatEngine:
    """Engine for the page's `parts`: one flat buffer, padded to equal shards."""

    def __init__(self, module, *, scenario, group):
        self.module, self.named = module, dict(module.named_parameters())
        self.rank, count = group.rank(), group.size()
        self.shard_elems = -(-sum(param.numel() for param in self.named.values()) // count)
        self.count = count
        own = self._padded([param.detach() for param in self.named.values()]).chunk(count)
        self.master = torch.nn.Parameter(own[self.rank].clone())
        said = scenario.optimizer
        self.adam = torch.optim.AdamW([self.master], lr=said.lr, weight_decay=said.weight_decay)

    def _padded(self, tensors):
        flat = torch.cat([each.reshape(-1) for each in tensors])
        return torch.nn.functional.pad(flat, (0, self.shard_elems * self.count - len(flat)))

    def zero_grad(self):
        self.module.zero_grad(set_to_none=False)

    def backward(self, loss, *, last_micro, rows):
        loss.backward()

    def step(self, *, lr_factor):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.named.values()]
        total = self._padded(grads)
        dist.all_reduce(total)
        self.master.grad = total.chunk(self.count)[self.rank] / self.count
        self.adam.step()
        shards = [torch.empty(self.shard_elems) for _ in range(self.count)]
        dist.all_gather(shards, self.master.detach())
        whole = torch.cat(shards)
        sizes = [param.numel() for param in self.named.values()]
        for param, new in zip(self.named.values(), whole[: sum(sizes)].split(sizes), strict=True):
            param.data.copy_(new.view_as(param))

    def params(self):
        return self.named


def test_documented_parts_cover_every_param():
    (code,) = [each for each in _python(TARGETS) if "flat_parts(" in each]
    names = {}
    exec(code, names)  # the code that readers copy

    class Shows(FlatEngine):
        parts = names["parts"]

    class Flat:
        name = "flat"
        capabilities = Capabilities(stages=(1,))
        numerics = Numerics(reported_grads="after-division")

        def build(self, module, *, scenario, group):
            return Shows(module, scenario=scenario, group=group)

    case = Scenario(
        schema=1, name="case", model=ModelSpec(name="params", shapes=((3,), (2, 2), ())),
        world=WorldSpec(size=3), optimizer=OptimizerSpec(name="adamw"), run=RunSpec(steps=3),
    )  # fmt: skip
    result = run_case(case, target=Flat())
    assert (result.verdict, result.findings) == ("pass", ())
    assert not {"masters and optimizer state", "reduced gradients"} & set(result.unobserved)


@pytest.mark.parametrize("name", ["OwnersTarget", "ShardsTarget"])
def test_documented_targets_of_ready_engines_pass(name):
    (code,) = [each for each in _python(TARGETS) if f"class {name}" in each]
    names = {}
    exec(code, names)  # the code that readers copy
    for optimizer in ("adamw", "sgd"):
        case = Scenario(
            schema=1, name="case", model=ModelSpec(name="params", shapes=((3,), (2, 2), ())),
            world=WorldSpec(size=3), run=RunSpec(steps=3, micro_batches=2),
            optimizer=OptimizerSpec(name=optimizer, weight_decay=0.1, warmup_steps=2),
        )  # fmt: skip
        result = run_case(case, target=names[name]())
        assert (result.verdict, result.findings) == ("pass", ())
        assert not {"masters and optimizer state", "reduced gradients"} & set(result.unobserved)


def test_documented_engine_hooks_exist():
    rows = re.findall(r"^\| `(\w+Engine)\.(\w+)\(([\w, ]*)\)`", TARGETS, flags=re.MULTILINE)
    assert len(rows) == 6
    for engine, hook, arguments in rows:
        signature = inspect.signature(getattr(getattr(targets, engine), hook))
        assert list(signature.parameters)[1:] == arguments.split(", ") * bool(arguments)


(TEN,) = [each for each in _python(TARGETS) if "class MyEngine" in each]


def test_ten_line_target_conforms():
    names = {}
    exec(compile(TEN, "test_mine.py", "exec"), names)  # the code that readers copy
    names["test_mine"]()


def test_ten_line_target_passes_the_documented_campaign(tmp_path, monkeypatch):
    (tmp_path / "test_mine.py").write_text(TEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shown = TARGETS[TARGETS.index("$ zero-sim fuzz --target test_mine") :]
    command, *lines = shown[: shown.index("```")].splitlines()
    done = CliRunner().invoke(main, command.removeprefix("$ zero-sim ").split())
    monkeypatch.delitem(sys.modules, "test_mine")
    assert done.exit_code == 0, done.output
    told = _without_times(done.output).splitlines()
    assert len(told) == len(lines)
    for line, want in zip(told, lines, strict=True):
        assert line.startswith(_without_times(want).removesuffix("...")), line


def _without_times(text):
    return re.sub(r"\d+\.\d+ (s\b|a second)", r"T \1", text)


@pytest.mark.parametrize(("declared", "verdict"), [(True, "pass"), (False, "fail")])
def test_documented_target_with_token_scaled_losses_passes(declared, verdict):
    names = {"torch": torch, "Numerics": Numerics}
    (code,) = [page for page in _python(TARGETS) if "class ByTokensTarget" in page]
    exec(TEN + code, names)  # the code that readers copy
    target = names["ByTokensTarget"]()
    if not declared:
        target.numerics = Numerics()
    case = Scenario(
        schema=1, name="case", model=ModelSpec(name="params", shapes=((3,), (2, 2), ())),
        world=WorldSpec(size=3), run=RunSpec(steps=2), system=spec.SystemSpec(stage=0),
        optimizer=OptimizerSpec(eps=0.1), data=spec.DataSpec(uneven_rows=True, loss="sum"),
    )  # fmt: skip
    target.capabilities = Capabilities(stages=(0,), follows=("optimizer.eps",))
    assert run_case(case, target=target).verdict == verdict


def test_every_loss_factor_is_documented():
    (rows,) = re.findall(r"^\| `scale_loss` \| factor .*?\n\n", TARGETS, flags=re.M | re.S)
    assert not [each for each in get_args(ScaleLoss) if f"`{each}`" not in rows]
    assert not [f.name for f in dataclasses.fields(LossRows) if f"`{f.name}`" not in rows]


@pytest.mark.parametrize("target", ["SignTarget", "SteppedTarget"])
def test_documented_targets_with_own_optimizer_pass(target):
    names = {}
    for code in _python(TARGETS):
        if re.search(r"class (Sign|Stepped)Target", code):
            exec(code, names)  # the code that readers copy
    case = Scenario(
        schema=1, name="case", model=ModelSpec(name="params", shapes=((3,), (2, 2), ())),
        world=WorldSpec(size=3), run=RunSpec(steps=3), system=spec.SystemSpec(stage=0),
        optimizer=OptimizerSpec(name="own", momentum=0.9, warmup_steps=2),
    )  # fmt: skip
    result = run_case(case, target=names[target]())
    assert (result.verdict, result.findings) == ("pass", ())
    assert not {"masters and optimizer state", "reduced gradients"} & set(result.unobserved)


def test_optimizer_helpers_are_public_with_documented_arguments():
    rows = re.findall(r"^\| `(\w+)\(([\w, ]+)\)", TARGETS, flags=re.MULTILINE)
    assert len(rows) == 8
    for name, arguments in rows:
        assert name in targets.__all__
        signature = inspect.signature(getattr(targets, name))
        assert list(signature.parameters) == arguments.split(", ")
