"""What the README shows works as shown."""

import re
from pathlib import Path

import pytest

from zero_sim.scenario.load import load_cases

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"), ids=["world", "scenario"])
def test_python_examples_run(code, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    source = tmp_path / "example.py"
    source.write_text(code)
    exec(compile(code, str(source), "exec"), {"__name__": "example"})
    if "World" in code:
        out = capsys.readouterr().out
        assert "[[6.0, 10.0], [14.0, 18.0], [22.0, 26.0], [30.0, 34.0]]" in out
        assert "example.py:7" in out


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
