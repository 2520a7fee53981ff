"""conformance(): judges within capabilities, finds planted faults and locates them."""

import importlib
import inspect
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import islice, repeat
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings

from tests.judge.ruled import Target as Ruled
from tests.run.summing import CASE, Engine, Undivided
from zero_sim import run_case
from zero_sim.backends.worlds import WorldPool
from zero_sim.cli.main import main
from zero_sim.errors import Problem
from zero_sim.findings.records import CaseResult, Evidence, Finding
from zero_sim.fuzz import drawing
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.scenario.load import parse_cases
from zero_sim.scenario.spec import (
    DataSpec,
    ModelSpec,
    OptimizerName,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.shrink import Limits
from zero_sim.targets import (
    Capabilities,
    Numerics,
    find_target,
    import_target,
    refusals,
    target_names,
)
from zero_sim.testing import NotConformant, conformance, scenarios

# The function of the same name shadows the module in its package.
conformance_module = importlib.import_module("zero_sim.testing.conformance")
EXAMPLE = Path(__file__).parents[2] / "examples" / "my_optimizer"

AMPLE = 3600.0
"""Seconds for a search that must finish even on a busy machine."""


class Idle:
    """A target that never updates a param."""

    name = "idle"

    def build(self, module, *, scenario, group):
        return IdleEngine(module)


class IdleEngine:
    def __init__(self, module):
        self.module = module

    def zero_grad(self):
        self.module.zero_grad()

    def backward(self, loss, *, last_micro, rows):
        loss.backward()

    def step(self, *, lr_factor):
        pass

    def params(self):
        return dict(self.module.named_parameters())


def failure_of(target, **options):
    """Return the error that a conformance test raises."""
    with pytest.raises(NotConformant) as failed:
        conformance(target, **options)()
    return failed.value


@pytest.fixture(scope="module")
def idle():
    return failure_of(Idle(), cases=20, shrink_seconds=AMPLE)


def test_failure_contains_the_finding_and_a_scenario_file(idle):
    text = str(idle)
    assert "equality.params" in text
    shown = text[text.index("schema = 1") : text.index("Saved as ")]
    (scenario,) = parse_cases(shown, source="text", stem="drawn")
    assert scenario == idle.scenario


class Premultiplies(Ruled):
    """A correct system that declares none of its rules."""

    def __init__(self):
        super().__init__({"divide": "premul", "told": "not"}, dtypes=("fp32",), models=("mlp",))


def test_failure_proposes_the_rules_of_the_system():
    failed = failure_of(Premultiplies(), cases=40, shrink_seconds=AMPLE)
    said = str(failed)
    assert "Not compared, because the target does not report it: " in said
    assert "reduced gradients" in said
    assert "Assumed rules: Numerics(), because none is declared" in said
    (proposed,) = re.findall("declare Numerics.*", said)
    rule = r"declare Numerics\(divide='premul(-fp32)?'\): with it, this case passes and so do "
    assert re.match(rule, proposed)


class Params(Engine):
    """An engine around a torch optimizer that reports only params."""

    def __init__(self, module, scenario, group):
        super().__init__(module, scenario, group, averages=False, keeps=False)
        self.scenario = scenario

    def params(self):
        return {name: param.detach() for name, param in self.module.named_parameters()}


class Sums(Idle):
    """A system that sums gradients over the ranks and never divides them."""

    name = "sums"
    follows = ("run.micro_batches",)

    def __init__(self, optimizers):
        self.capabilities = Capabilities(optimizers=optimizers, follows=self.follows)

    def build(self, module, *, scenario, group):
        return Params(module, scenario, group)


class OfTokens(Params):
    """Losses scaled by ranks over tokens: a correct mean that the target does not declare."""

    def backward(self, loss, *, last_micro, rows):
        data, ranks = self.scenario.data, self.group.size()
        tokens = sum(data.rows + r % 3 * data.uneven_rows for r in range(ranks))
        (loss * (ranks / tokens / self.scenario.run.micro_batches)).backward()

    def step(self, *, lr_factor):
        for param in self.module.parameters():
            param.grad /= self.group.size()
        super().step(lr_factor=lr_factor)


class ByTokens(Sums):
    """A system that divides by tokens in its losses."""

    numerics = Numerics(divide="post", divide_by="tokens")

    def build(self, module, *, scenario, group):
        return OfTokens(module, scenario, group)


ONE_STEP = Scenario(
    schema=1,
    name="one step",
    model=ModelSpec(name="params", shapes=((2,),)),
    data=DataSpec(rows=3),
    optimizer=OptimizerSpec(lr=0.1),
    system=SystemSpec(stage=0),
)


def what_is_said(target, *, ranks, seed):
    """Return the explanation that `conformance` adds for one case, and the detail of its
    finding.
    """
    case = replace(ONE_STEP, world=WorldSpec(size=ranks), run=RunSpec(steps=1, seed=seed))
    with WorldPool() as pool:
        judge = partial(run_case, pool=pool, target=target)
        result = judge(case)
        subject = conformance_module._Subject(
            target=target, name="", judge=judge, pool=pool, limits=Limits()
        )
        return conformance_module._explain_rules(case, result, subject), result.findings[0].detail


def test_rule_confirmed_by_sgd_on_several_ranks_is_proposed():
    led, _ = what_is_said(Sums(("adamw", "sgd")), ranks=2, seed=1)
    assert led.endswith(
        "If this is intended, declare Numerics(divide='none'): with it, this case passes and so "
        "do 12 others that distinguish rules."
    )


def test_no_rule_is_proposed_if_the_optimizer_hides_factors():
    led, detail = what_is_said(Sums(("adamw",)), ranks=2, seed=1)
    assert "No rule is proposed: the target supports no case that distinguishes rules" in led
    assert "these are the bits of divide = 'none'.\nNo rule is proposed: params that a" in detail
    assert "declare Numerics" not in led + detail


def test_no_rule_is_proposed_that_fits_only_one_rank():
    led, detail = what_is_said(ByTokens(("adamw", "sgd")), ranks=1, seed=6)
    assert "bits of divide = 'none' or divide_by = 'ranks' or divide_by = 'micro-ba" in detail
    assert "No rule is proposed: a case of one rank does not tell rules apart" in detail
    assert "No rule is proposed: rules that fit this case do not fit others" in led
    assert "declare Numerics" not in led + detail


def test_failure_without_an_explaining_rule_is_stated(idle):
    assert "No other known rule makes it pass." in str(idle)


def test_printed_command_reproduces_the_failure(tmp_path, monkeypatch):
    source = "\n\n".join(map(inspect.getsource, (Idle, IdleEngine)))
    (tmp_path / "an_idle_target.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    failed = failure_of(import_target("an_idle_target:Idle"), cases=20)
    text = str(failed)
    Path("case.toml").write_text(text[text.index("schema = 1") : text.index("Saved as ")])
    done = CliRunner().invoke(main, shlex.split(text.splitlines()[-1])[1:])
    assert done.exit_code == 1, done.output
    assert "equality.params" in done.output


def test_unnamed_target_gets_a_placeholder_in_the_command():
    target = Idle()
    target.option = 3
    with pytest.raises(NotConformant, match="--target MODULE:NAME") as failed:
        conformance(target, cases=20, shrink_seconds=0)()
    assert "with the name under which a module has this target" in str(failed.value)


def test_failure_shrinks_to_one_rank_and_one_element(idle):
    scenario = idle.scenario
    assert (scenario.world.size, scenario.model.shapes, scenario.run.steps) == (1, ((1,),), 1)


def test_failure_contains_sizes_before_and_after_shrinking(idle):
    text = str(idle)
    assert re.search(r"\n  before      \d+ ranks?, \d+ params?, ", text)
    assert re.search(r"\n  smallest    1 rank, 1 param, 1 element.*; \d+ cases?, \d+\.\d s", text)


def test_search_without_time_is_stated():
    with pytest.raises(NotConformant, match=r"; 0 cases, \d+\.\d s; stopped by the limit on time"):
        conformance(Idle(), cases=20, shrink_seconds=0)()


def differing(scenario, *, by, manner="values"):
    """Return a failed result with a relative difference of `by`."""
    evidence = Evidence(start=0, expected=torch.ones(2), got=torch.ones(2) * (1 - by))
    found = Finding(check="equality.params", message="m", manner=manner, evidence=evidence)
    return CaseResult(id=scenario.name, verdict="fail", seconds=0.0, findings=(found,))


def judged_by(monkeypatch, results):
    """Replace `run_case` by these results in order, then passes. Returns the list of judged
    cases.
    """
    judged, left = [], iter(results)

    def judge(scenario, **_):
        judged.append(scenario)
        result = next(left, lambda case: CaseResult(id=case.name, verdict="pass", seconds=0.0))
        return result(scenario)

    monkeypatch.setattr(conformance_module, "run_case", judge)
    return judged


def test_case_with_the_largest_difference_is_shown(monkeypatch):
    judged = judged_by(
        monkeypatch,
        [
            partial(differing, by=1e-7, manner="one-ulp"),
            partial(differing, by=0.3),
            partial(differing, by=1e-6),
        ],
    )
    failed = failure_of(Idle(), cases=5, shrink_seconds=0)
    assert len({case.run for case in judged[:3]}) == 3
    assert failed.scenario.run == judged[1].run
    assert "equality.params: 3 of 5 cases (values 2, one-ulp 1)" in str(failed)


def test_drawing_ends_at_the_first_finding_other_than_values(monkeypatch):
    def deadlock(scenario):
        found = Finding(check="world.deadlock", message="m")
        return CaseResult(id=scenario.name, verdict="fail", seconds=0.0, findings=(found,))

    judged = judged_by(monkeypatch, [partial(differing, by=0.3), deadlock, deadlock])
    failed = failure_of(Idle(), cases=20, shrink_seconds=0)
    assert failed.scenario.run == judged[1].run
    # Later cases are judged only to check rules.
    assert "2 of 2 cases" not in str(failed)
    assert "world.deadlock: 1 of 2 cases" in str(failed)


def test_refused_cases_are_not_judged():
    class Picky(Idle):
        def refuses(self, scenario):
            ranks = scenario.world.size
            return () if ranks >= 2 else (Problem(path="world.size", message="too few"),)

    failed = failure_of(Picky(), cases=40, shrink_seconds=AMPLE)
    assert failed.scenario.world.size == 2


def test_case_that_ends_in_an_error_is_shown_unshrunk(monkeypatch):
    judged = []

    def judge(scenario, **_):
        judged.append(scenario)
        return CaseResult(id=scenario.name, verdict="error", seconds=0.0, error="no such thing")

    monkeypatch.setattr(conformance_module, "run_case", judge)
    with pytest.raises(NotConformant, match="no such thing\n\nThe case, as a scenario file"):
        conformance(Idle(), cases=20)()
    assert len(judged) == 1


def test_same_seed_draws_the_same_cases():
    drawn = []

    class Watching(Idle):
        def refuses(self, scenario):
            drawn.append(scenario)
            return ()

    for _ in range(2):
        with pytest.raises(NotConformant):
            conformance(Watching(), cases=5, seed=3)()
    half = len(drawn) // 2
    assert drawn[:half] == drawn[half:]


def test_only_inconclusive_cases_are_a_failure(monkeypatch):
    def judge(scenario, **_):
        return CaseResult(id=scenario.name, verdict="inconclusive", seconds=0.0)

    monkeypatch.setattr(conformance_module, "run_case", judge)
    with pytest.raises(AssertionError, match="which prove nothing"):
        conformance(Idle(), cases=2)()


def test_declaration_that_excludes_all_cases_is_named(monkeypatch):
    monkeypatch.setattr(drawing, "_FRUITLESS_DRAWS_MAX", 100)

    class Excluded(Idle):
        capabilities = Capabilities(only=(("world.strict", (False,)),))

    with pytest.raises(AssertionError, match=r"no case fits target 'idle': Capabilities\.only = "):
        conformance(Excluded(), cases=2)()


@pytest.mark.parametrize("name", target_names())
def test_drawn_cases_are_within_capabilities(name):
    target = find_target(name)

    @given(scenario=scenarios(target))
    @settings(max_examples=60, database=None, derandomize=True, deadline=None)
    def check(scenario):
        assert refusals(target, scenario) == ()
        assert scenario.system.target == name

    check()


def test_every_declared_optimizer_is_drawn():
    cases = islice(draws(drawn_cases(find_target("torch-ddp")), seed="0"), 1500)
    seen: set[OptimizerName] = {case.optimizer.name for case in cases}
    assert seen == set(find_target("torch-ddp").capabilities.optimizers)


def run_example(folder):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        cwd=folder, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(EXAMPLE.parents[1]), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip


def test_example_package_passes():
    result = run_example(EXAMPLE)
    assert result.returncode == 0, result.stdout
    assert "1 passed" in result.stdout


def test_off_by_one_in_the_example_is_found_with_a_small_case(tmp_path):
    folder = tmp_path / "my_optimizer"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    source = folder / "my_optimizer" / "sharded_adamw.py"
    right = "rank * least + min(rank, longer)"
    assert right in source.read_text()
    # No rank owns the elements that remain after the division.
    source.write_text(source.read_text().replace(right, "rank * least"))
    judged = folder / "test_my_optimizer.py"
    judged.write_text(judged.read_text().replace("cases=50", f"cases=50, shrink_seconds={AMPLE}"))
    result = run_example(folder)
    assert result.returncode == 1, result.stdout
    assert "equality.params" in result.stdout
    shown = result.stdout[result.stdout.index("schema = 1") : result.stdout.index("Saved as ")]
    text = "\n".join(line.strip() for line in shown.splitlines())
    (scenario,) = parse_cases(text, source="text", stem="drawn")
    assert scenario.world.size == 2
    assert scenario.model.shapes in (((),), ((1,),))


def test_case_judged_by_params_only_is_repeated_with_sgd(monkeypatch):
    """The failure is shown as a case with SGD that fails on its own."""
    monkeypatch.setattr(conformance_module, "draws", lambda *_, **__: repeat(CASE))
    failed = failure_of(Undivided(), cases=1, shrink_seconds=AMPLE)
    assert "found with SGD in place of AdamW" in str(failed)
    assert failed.scenario.optimizer.name == "sgd"
    assert run_case(failed.scenario, target=Undivided()).verdict == "fail"


@pytest.mark.parametrize(
    ("scopes", "said", "scope"),
    [
        (["params-only", "full"], "2 pass (1 by params only)", "params-only"),
        (["full", "full"], "2 pass", "full"),
    ],
)
def test_pass_counts_cases_judged_by_params_only(monkeypatch, capsys, scopes, said, scope):
    def came(scenario, verdict="pass", scope="full"):
        return CaseResult(id=scenario.name, verdict=verdict, scope=scope, seconds=0.0)

    judged_by(monkeypatch, [partial(came, scope=each) for each in scopes])
    test = conformance(Idle(), cases=2)
    test()
    assert capsys.readouterr().out == f"conformance of {Idle.name}: {said}\n"
    assert vars(test)["zero_sim_properties"] == {"scope": scope, "verdicts": said}
    judged_by(monkeypatch, [partial(came, verdict="inconclusive")] * 2)
    with pytest.raises(AssertionError):
        test()
    assert vars(test).get("zero_sim_properties") is None
