"""`zero-sim mutants`: a line per mutant, then the score."""

import json

from click.testing import CliRunner

from zero_sim.cli.main import main
from zero_sim.mutants import campaign
from zero_sim.mutants.records import HuntResult
from zero_sim.mutants.smallest import smallest_cases


def invoke(*arguments):
    return CliRunner().invoke(main, ["mutants", *arguments])


def test_killed_mutant_is_printed():
    result = invoke("M05", "--cases", "40", "--jobs", "1")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("M05   LAYOUT  killed by ")
    assert result.stdout.splitlines()[-1].startswith("1 of 1 mutants killed in ")


def test_surviving_mutant_is_described():
    result = invoke("M95", "--cases", "1", "--jobs", "1")
    assert result.exit_code == 1
    assert "M95   CKPT    SURVIVED after 1 case" in result.stdout
    assert "string order of their numbers. [DeepSpeed#5342]" in result.stdout


def test_json_has_trials_and_score():
    said = json.loads(invoke("M05", "--cases", "40", "--jobs", "1", "--json").stdout)
    assert said["all"] == {"name": "all", "killed": 1, "of": 1}
    assert said["trials"][0]["id"] == "M05"
    assert said["exit_status"] == 0


def test_shrunk_size_is_printed():
    result = invoke("L01", "--jobs", "1", "--shrink")
    size = "2 ranks, 1 param, 2 elements, 1 step, 0 features"
    assert result.stdout.splitlines()[0].endswith(f", shrunk to {size}")


def test_another_size_on_record_is_printed(monkeypatch):
    other = smallest_cases()["E03"]
    monkeypatch.setattr(campaign, "smallest_cases", lambda: {"L01": other})
    line = invoke("L01", "--jobs", "1", "--shrink").stdout.splitlines()[0]
    assert line.endswith(" (on record: 2 ranks, 1 param, 1 element, 1 step, 0 features)")


def test_json_has_the_size_and_the_smallest_case():
    (trial,) = json.loads(invoke("L01", "--jobs", "1", "--shrink", "--json").stdout)["trials"]
    assert trial["size"] == {"ranks": 2, "params": 1, "elements": 2, "steps": 1, "features": 0}
    assert "shapes = [[2]]" in trial["smallest"]


def test_unknown_mutant_is_refused():
    result = invoke("M999")
    assert result.exit_code == 2
    assert "M999" in result.stderr


def test_empty_selection_has_exit_status_5():
    assert invoke("M73", "--class", "CKPT").exit_code == 5


def test_interrupt_keeps_the_score_so_far(monkeypatch):
    def interrupted(ids, **options):
        yield HuntResult(id=ids[0], killed=True, check="equality.grad", cases=2)
        raise KeyboardInterrupt

    monkeypatch.setattr(campaign, "run_campaign", interrupted)
    result = invoke("M05", "M07", "--jobs", "1")
    assert result.exit_code == 130
    assert result.stdout.splitlines()[-1].startswith("1 of 1 mutants killed in ")
    assert result.stderr == "Interrupted; 1 mutants were not tried.\n"


def test_smallest_case_is_recorded_in_a_table(tmp_path):
    path = tmp_path / "table.json"
    result = invoke("L01", "--jobs", "1", "--shrink", "--record", str(path))
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["L01"]["model"] == {"name": "params", "shapes": [[2]]}


def test_record_without_shrink_is_refused(tmp_path):
    result = invoke("L01", "--record", str(tmp_path / "table.json"))
    assert result.exit_code == 2
    assert "expected --shrink with --record" in result.output
