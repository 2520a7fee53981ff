"""Errors of all readers, whose values are clipped."""

import json

import pytest

from tests.fuzz.corpus_reports import report_of
from tests.fuzz.test_old_corpus import old_line, write
from zero_sim.bundle import read_bundle
from zero_sim.calculators.network_file import load_network
from zero_sim.errors import Problem, ScenarioError, UsageError
from zero_sim.fuzz.corpus import read_corpus
from zero_sim.report.fingerprints import read_calls
from zero_sim.scenario.load import load_cases
from zero_sim.targets import find_target

LONG = "n" * 100_000


def scenario(folder):
    (folder / "a.toml").write_text(f'schema = 1\nmodel = {{name = "mlp", {LONG} = 1}}')
    load_cases(folder / "a.toml")


def matrix(folder):
    (folder / "a.toml").write_text(
        f'schema = 1\nmodel = {{name = "mlp"}}\n[matrix]\n"world.{LONG}" = [1]'
    )
    load_cases(folder / "a.toml")


def topology(folder):
    (folder / "a.toml").write_text(f'{LONG} = 1\n[inside]\n{LONG} = "{LONG}"')
    load_network(folder / "a.toml")


def corpus(folder):
    read_corpus(write(folder / "corpus", old_line(report_of(0)) | {"seconds": LONG}))


def trace(folder):
    (folder / "a.json").write_text(json.dumps({"traceEvents": [{"name": LONG, "args": LONG}]}))
    read_calls(folder / "a.json", rank=0)


def target(folder):
    find_target(LONG)


@pytest.mark.parametrize(
    "reader",
    [scenario, matrix, topology, corpus, trace, target],
    ids=lambda reader: reader.__name__,
)
def test_long_values_of_a_file_are_clipped(reader, tmp_path):
    with pytest.raises(UsageError) as caught:
        reader(tmp_path)
    assert len(str(caught.value)) < 5_000
    assert "expected" in str(caught.value) or "unknown" in str(caught.value)


SECRET = "root:*:19000:0:99999:7:::"


@pytest.mark.parametrize(
    ("read", "name", "said"),
    [
        (load_cases, "a.toml", "got: a link, not a regular file. Put a copy of the file"),
        (load_network, "a.toml", "got: a link, not a regular file. Put a copy of the file"),
        (lambda path: read_calls(path, rank=0), "a.json", "expected JSON"),
        (read_corpus, "batches-1-of-1.jsonl", "got: a link, not a regular file"),
        (read_corpus, "shard-1-of-1.sqlite", "got: a link, not a regular file"),
        (read_bundle, "bundle.json", "got: a link, not a regular file"),
    ],
    ids=["scenario", "topology", "trace", "old corpus", "corpus", "bundle"],
)
def test_error_shows_no_line_of_a_link_target(read, name, said, tmp_path):
    (tmp_path / "shadow").write_text(SECRET)
    (tmp_path / name).symlink_to("shadow")
    with pytest.raises(UsageError) as caught:
        read(tmp_path if name == "bundle.json" else tmp_path / name)
    assert said in str(caught.value)
    assert "19000" not in str(caught.value)


def test_problem_has_the_same_clipped_text_everywhere():
    problem = Problem(path=LONG, message=f"got {LONG}.", suggestion=f"Try {LONG}.")
    assert str(ScenarioError("a.toml", [problem])) == f"a.toml: 1 problem\n  {problem}"
    assert max(map(len, (problem.path, problem.message, problem.suggestion))) < 400
