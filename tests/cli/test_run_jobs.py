"""`zero-sim run --jobs`: the same lines, bundles and exit status as without."""

import json
import re
from pathlib import Path

FAULT = """[[faults]]
kind = "corrupt"
rank = 1
collective = "reduce_scatter"
element = 1
bit = 30
"""
SECONDS = re.compile(r" +[\d.]+ s\b")
"""The spaces before it belong to it: column width depends on the time."""


def lines(result):
    return [SECONDS.sub("", line) for line in result.output.splitlines() if "replay" not in line]


def test_output_and_status_equal_those_of_one_process(invoke):
    Path("wrong.toml").write_text(Path("one.toml").read_text() + FAULT)
    alone = invoke("run", "several.toml", "wrong.toml", "one.toml")
    shared = invoke("run", "several.toml", "wrong.toml", "one.toml", "--jobs", 2)
    assert alone.exit_code == shared.exit_code == 1
    assert lines(shared) == lines(alone)
    # The id of a bundle is computed from its content, including logs and tensors.
    assert len(list(Path(".zero-sim/bundles").iterdir())) == 1


def test_json_has_the_cases_in_order(invoke):
    result = invoke("run", "several.toml", "one.toml", "--jobs", 2, "--json")
    assert result.exit_code == 0
    ids = [case["id"] for case in json.loads(result.stdout)["cases"]]
    assert ids == ["several/seed=1", "several/seed=2", "one"]


def test_jobs_are_refused_for_real_processes(invoke):
    result = invoke("run", "several.toml", "--jobs", 2, "--backend", "gloo")
    assert result.exit_code == 2
    assert "expected --jobs with --backend sim" in result.output
