"""JSON output of every command, validated against its schema."""

import json
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from zero_sim import bench
from zero_sim.cli import main as cli
from zero_sim.report.records import Measurement
from zero_sim.report.schemas import COMMANDS, VERSION


def schema_of(what):
    """Return a schema as the command line prints it."""
    return json.loads(CliRunner().invoke(cli.main, ["schema", what]).stdout)


@pytest.fixture
def outputs(invoke, broken, monkeypatch):
    """Outputs of each command for a broken system."""
    row = Measurement(name="a", value=1.0, unit="s", goal=None, ok=None)
    monkeypatch.setattr(bench, "run_benchmarks", lambda only: [row])
    Path("bad.toml").write_text("schema = 1\n")
    broken(True)
    ran = invoke("run", "one.toml", "bad.toml", "--json").stdout
    bundle = json.loads(ran)["cases"][0]["bundle"]
    few = ("--jobs", 1, "--cases", 1)
    counted = ("--params", "1e6", "--ranks", "8")
    told = {
        "run": [ran],
        "replay": [invoke("replay", bundle, "--json").stdout],
        "explain": [invoke("explain", name, "--json").stdout for name in (bundle, "equality.loss")],
        "shrink": [invoke("shrink", bundle, "--seconds", "1e-9", "--json").stdout],
        "fuzz": [
            invoke("fuzz", *few, "--corpus", corpus, "--json", *more).stdout
            for corpus, more in (("corpus", ()), ("covered", ("--coverage",)))
        ]
        + [invoke("fuzz", "--join", "corpus", "--corpus", "joined", "--json").stdout],
        "memory": [invoke("memory", *counted, "--json").stdout],
        "traffic": [invoke("traffic", *counted, "--json").stdout],
        "fingerprint": [invoke("fingerprint", "one.toml", "--json").stdout],
        "doctor": [invoke("doctor", "--json").stdout],
        "rules": [invoke("rules", "--target", "single-device", "--json").stdout],
        "bench": [invoke("bench", "--json").stdout],
    }
    broken(False)
    told["run"].append(invoke("run", "one.toml", "-k", "none", "--json").stdout)
    told["replay"].append(invoke("replay", bundle, "--json").stdout)
    told["shrink"].append(invoke("shrink", "one.toml", "--json").stdout)
    told["mutants"] = [invoke("mutants", "M05", *few, "--json").stdout]
    return told


def test_output_of_every_command_matches_its_schema(outputs):
    """One test for all, so that the broken system runs once."""
    assert outputs.keys() == set(COMMANDS)
    for command, texts in outputs.items():
        schema = schema_of(command)
        jsonschema.Draft202012Validator.check_schema(schema)
        for text in texts:
            told = json.loads(text)
            assert told["schema"] == VERSION
            jsonschema.validate(told, schema)


def test_missing_or_unknown_field_violates_the_schema():
    """Proves that the schemas are not too lax."""
    schema = schema_of("doctor")
    fact = {"name": "a", "value": "b", "ok": True, "note": "", "required": False}
    jsonschema.validate({"schema": VERSION, "facts": [fact]}, schema)
    for wrong in ({**fact, "more": 1}, {"name": "a"}, {**fact, "ok": "yes"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"schema": VERSION, "facts": [wrong]}, schema)


def test_fields_are_described():
    case = schema_of("run")["properties"]["cases"]["items"]
    assert case["properties"]["notes"]["description"].startswith("Remarks for the reader")
    finding = case["properties"]["findings"]["items"]["properties"]
    assert finding["step"]["description"] == "Optimizer step, counted from 0."


def test_schema_of_scenarios_is_the_default():
    told = json.loads(CliRunner().invoke(cli.main, ["schema"]).stdout)
    assert told == schema_of("scenario")
    assert told["title"] == "zero_sim scenario"


def test_command_without_a_schema_is_refused():
    done = CliRunner().invoke(cli.main, ["schema", "export"])
    assert done.exit_code == 2
    assert "expected the name of a schema, got 'export'" in done.output
