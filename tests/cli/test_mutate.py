"""`zero-sim mutate`: each change in a line, then by module."""

import json

from click.testing import CliRunner

from zero_sim.cli.main import main
from zero_sim.fuzz import mutating


def invoke(*arguments):
    return CliRunner().invoke(main, ["mutate", "--jobs", "1", *arguments])


def test_each_change_and_the_sums():
    result = invoke("zero_sim.zero.norm", "--changes", "2", "--cases", "2")
    assert result.exit_code == 0, result.output
    *lines, _, by_module, headline = [
        line for line in result.stdout.splitlines() if not line.startswith("What survives")
    ]
    assert len(lines) == 2
    assert all(line.startswith("zero_sim.zero.norm:") for line in lines)
    assert by_module.startswith("zero_sim.zero.norm  ")
    assert headline.startswith("2 of ")


def test_json_and_nothing_else():
    said = json.loads(
        invoke("zero_sim.zero.norm", "--changes", "1", "--cases", "1", "--json").stdout
    )
    (one,) = said["changes"]
    assert one["verdict"] in ("found", "survived", "not reached")
    assert one["change"]["module"] == "zero_sim.zero.norm"
    assert said["of"] > 1


def test_no_such_module():
    result = invoke("zero_sim.nothing")
    assert result.exit_code == 2
    assert "zero_sim.nothing" in result.stderr


def test_a_module_without_anything_to_change():
    assert invoke("zero_sim.zero").exit_code == 5


def test_an_interrupt_keeps_what_was_tried(monkeypatch):
    real = mutating.try_changes

    def interrupted(*args, **options):
        yield next(real(*args, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(mutating, "try_changes", interrupted)
    result = invoke("zero_sim.zero.norm", "--changes", "3", "--cases", "1")
    assert result.exit_code == 130
    assert "1 of " in result.stdout.splitlines()[-2:][0] + result.stdout.splitlines()[-1]
    assert result.stderr == "Interrupted; 2 changes were not tried.\n"
