"""What the README shows works as shown."""

import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from zero_sim.scenario.load import load_cases
from zero_sim.sim import DataRace

pytest_plugins = ["pytester"]

_INSTALLED = any(p.value == "zero_sim.pytest_plugin" for p in entry_points(group="pytest11"))
LOAD = () if _INSTALLED else ("-p", "zero_sim.pytest_plugin")

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


WORLD, RACE, TEST, SCENARIO = blocks("python")


@pytest.mark.parametrize("code", [WORLD, SCENARIO], ids=["world", "scenario"])
def test_python_examples_run(code, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    source = tmp_path / "example.py"
    source.write_text(code)
    exec(compile(code, str(source), "exec"), {"__name__": "example"})
    if "World" in code:
        out = capsys.readouterr().out
        assert "[[6.0, 10.0], [14.0, 18.0], [22.0, 26.0], [30.0, 34.0]]" in out
        assert "example.py:7" in out


def test_the_race_is_told_as_shown(tmp_path):
    source = tmp_path / "train.py"
    source.write_text(RACE)
    with pytest.raises(DataRace) as caught:
        exec(compile(RACE, str(source), "exec"), {"__name__": "example"})
    told = f"DataRace: {caught.value}".replace(str(source), "train.py")
    assert told.strip() in README


def test_the_test_passes(pytester):
    pytester.makepyfile(TEST)
    pytester.runpytest_inprocess(*LOAD, "-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_the_scenario_loads_and_expands(tmp_path):
    (source,) = blocks("toml")
    path = tmp_path / "mine.toml"
    path.write_text(source)
    assert len(load_cases(path)) == 6


def test_it_opens_with_the_two_commands():
    head = README[: README.index("Python 3.11")]
    assert "make run" in head
    assert "make test" in head


def test_every_path_it_names_exists():
    for path in re.findall(r"`((?:zero_sim|scenarios)/[\w/.-]+)`", README):
        assert (ROOT / path).exists(), path
