"""Examples, commands and outputs of README and the first pages work as shown."""

import re
from importlib.metadata import entry_points
from pathlib import Path

import click
import pytest
import torch.distributed as dist

from tests.transcripts import assert_shown, blocks, run_command, transcripts
from zero_sim import World
from zero_sim.cli.main import main
from zero_sim.scenario.load import load_cases
from zero_sim.sim import DataRace, Deadlock
from zero_sim.zero import collectives

pytest_plugins = ["pytester"]

_INSTALLED = any(p.value == "zero_sim.pytest_plugin" for p in entry_points(group="pytest11"))
LOAD = () if _INSTALLED else ("-p", "zero_sim.pytest_plugin")

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
WORLDS, SCENARIOS, FINDING = (
    (ROOT / "docs" / f"{name}.md").read_text() for name in ("worlds", "scenarios", "first-finding")
)


(TEST,) = blocks(README, "python")
WORLD, RACE = blocks(WORLDS, "python")
(SCENARIO,) = blocks(SCENARIOS, "python")


@pytest.mark.parametrize("code", [WORLD, SCENARIO], ids=["world", "scenario"])
def test_python_examples_run(code, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    source = tmp_path / "example.py"
    source.write_text(code)
    exec(compile(code, str(source), "exec"), {"__name__": "example"})
    if "World" in code:
        out = capsys.readouterr().out
        assert out.replace(f"{tmp_path}/", "") == blocks(WORLDS, "text")[0]


def test_race_message_is_as_documented(tmp_path):
    source = tmp_path / "train.py"
    source.write_text(RACE)
    with pytest.raises(DataRace) as caught:
        exec(compile(RACE, str(source), "exec"), {"__name__": "example"})
    told = f"DataRace: {caught.value}".replace(str(source), "train.py")
    assert told.strip() in WORLDS


def test_example_test_fails_as_documented(pytester):
    pytester.makepyfile(test_race=TEST)
    result = pytester.runpytest_inprocess(*LOAD, "-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    (shown,) = blocks(README, "text")
    lines = shown.strip().splitlines()
    start = result.outlines.index(lines[0])
    assert result.outlines[start : start + len(lines)] == lines


def test_readme_is_at_most_150_lines():
    assert len(README.splitlines()) <= 150


def test_readme_links_exist():
    for path in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        assert (ROOT / path).exists(), path


def test_divergence_counts_are_correct():
    rows = [line for line in UPSTREAM.splitlines() if line.startswith("| `")]
    silent = sum("silent" in row for row in rows)
    assert f"It found {len(rows)} divergences" in README
    assert f"{silent} of them\nsilent" in README


def test_documented_scenario_expands_to_six_cases(tmp_path):
    (source,) = blocks(SCENARIOS, "toml")
    path = tmp_path / "mine.toml"
    path.write_text(source)
    assert len(load_cases(path)) == 6


def test_every_path_on_the_pages_exists():
    for path in re.findall(r"`((?:zero_sim|scenarios)/[\w/.-]+)`", WORLDS + SCENARIOS + FINDING):
        assert (ROOT / path).exists(), path


UPSTREAM = (ROOT / "scenarios" / "upstream" / "README.md").read_text()
CONSOLE = [*blocks(FINDING, "console"), *blocks(SCENARIOS, "console")]
SHOWN = [each for page in (FINDING, SCENARIOS) for each in transcripts(page)]
"""Commands with their documented output."""
SELECTED, BROKEN, MENDED = SHOWN


# Slow, because two of its cases are the large model of the example.
def test_output_of_selected_cases_is_as_documented(monkeypatch):
    monkeypatch.chdir(ROOT)
    command, shown = SELECTED
    assert_shown(shown, run_command(command))


@pytest.fixture
def averaged(monkeypatch):
    """Replace SUM by AVG in `reduce_scatter_sum`, without moving its line."""
    source = Path(collectives.__file__).read_text()
    start = source.index("def reduce_scatter_sum")
    stop = source.index("\ndef ", start)
    changed = source[start:stop].replace("ReduceOp.SUM", "ReduceOp.AVG")
    names = {"__name__": collectives.__name__}
    code = source[:start] + changed + source[stop:]
    exec(compile(code, collectives.__file__, "exec"), names)
    right = collectives.reduce_scatter_sum
    monkeypatch.setattr(right, "__code__", names["reduce_scatter_sum"].__code__)


def test_output_of_a_broken_line_is_as_documented(averaged, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    command, shown = BROKEN
    output = run_command(f"{command} --bundles {tmp_path / 'bundles'}")
    assert_shown(shown, output.replace(f" --bundles {tmp_path / 'bundles'}", ""))


def test_output_of_a_repaired_line_is_as_documented(request, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    with monkeypatch.context() as patch:
        right = collectives.reduce_scatter_sum.__code__
        request.getfixturevalue("averaged")
        run_command(f"{BROKEN[0]} --bundles {tmp_path}")
        patch.undo()
        collectives.reduce_scatter_sum.__code__ = right
    command, shown = MENDED
    assert_shown(shown, run_command(f"{command.partition('#')[0]} --bundles {tmp_path}"))


def test_deadlock_message_is_as_documented(tmp_path, monkeypatch):
    (shown,) = re.findall(r"```text\n(deadlock: .*?)```", WORLDS, flags=re.DOTALL)
    lines = [*[""] * 8, "def program(rank):", "    dist.barrier()"]
    lines.append("    rank == 2 or dist.all_reduce(torch.ones(1))")
    source = tmp_path / "train.py"
    source.write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    names = {"dist": dist, "torch": __import__("torch")}
    exec(compile(source.read_text(), str(source), "exec"), names)
    with World(4) as world, pytest.raises(Deadlock) as caught:
        world.run(names["program"])
    assert str(caught.value).strip() == shown.strip()


def commands_named():
    for block in CONSOLE:
        for name, words in re.findall(r"zero[-_]sim (\w+)([^\n#]*)", block):
            yield name, [word for word in words.split() if word.startswith("-")]


def test_every_documented_command_and_option_exists():
    named = list(commands_named())
    assert len(named) > 3
    for name, options in named:
        params = main.commands[name].params
        known = {
            o for p in params if isinstance(p, click.Option) for o in (*p.opts, *p.secondary_opts)
        }
        assert set(options) <= known, name
