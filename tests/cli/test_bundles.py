"""`zero-sim run` with bundles and traces, `zero-sim replay` and `zero-sim export`, end to end."""

import json
import shlex
from pathlib import Path

import pytest

STAGES = """schema = 1
model = {name = "mlp", hidden = 5}
run = {steps = 2}
system = {bucket_elems = 60}
[matrix]
"system.stage" = [0, 1, 2, 3]
"""


class TestRun:
    def test_failing_case_prints_its_replay_command(self, invoke, broken):
        broken(True)
        result = invoke("run", "one.toml")
        assert result.exit_code == 1
        *_, line, explain, summary = result.stdout.splitlines()
        assert explain.startswith("  explain: zero-sim explain equality.")
        assert summary.startswith("1 case")
        command = shlex.split(line.removeprefix("  replay: "))
        assert command[:2] == ["zero-sim", "replay"]
        again = invoke(*command[1:])
        assert (again.exit_code, again.stdout.split()[0]) == (1, "FAILED")
        broken(False)
        again = invoke(*command[1:])
        assert (again.exit_code, again.stdout.split()[0]) == (0, "FIXED")

    def test_replay_command_contains_another_folder(self, invoke, broken):
        broken(True)
        result = invoke("run", "one.toml", "--bundles", "my bundles")
        (path,) = Path("my bundles").iterdir()
        assert f"  replay: zero-sim replay {path.name} --bundles 'my bundles'" in result.stdout
        assert not Path(".zero-sim").exists()

    def test_same_failure_is_one_bundle(self, invoke, bundle, broken):
        """Even if found in the bundle's own scenario file."""
        broken(True)
        result = invoke("run", f".zero-sim/bundles/{bundle}/case.toml", "--json")
        (case,) = json.loads(result.stdout)["cases"]
        assert (case["id"], case["bundle"]) == ("one", bundle)
        assert [path.name for path in Path(".zero-sim/bundles").iterdir()] == [bundle]

    @pytest.mark.parametrize("options", [(), ("--json",)])
    def test_no_bundles_option_writes_none(self, invoke, broken, options):
        broken(True)
        result = invoke("run", "one.toml", "--no-bundles", *options)
        assert result.exit_code == 1
        assert not Path(".zero-sim").exists()
        assert "replay:" not in result.stdout

    def test_pass_writes_no_bundle(self, invoke):
        assert "replay:" not in invoke("run", "one.toml").stdout
        assert not Path(".zero-sim").exists()

    def test_json_contains_the_bundle_id(self, invoke, broken):
        (case,) = json.loads(invoke("run", "one.toml", "--json").stdout)["cases"]
        assert case["bundle"] is None
        broken(True)
        (case,) = json.loads(invoke("run", "one.toml", "--json").stdout)["cases"]
        assert Path(".zero-sim/bundles", case["bundle"], "bundle.json").exists()
        assert not {"logs", "evidence"} & {*case, *case["findings"][0]}
        assert case["strip"]["buckets"][0]["start"] == 0
        assert sum(case["guarantees"].values()) > 0

    def test_unwritable_bundle_folder_does_not_change_the_verdict(self, invoke, broken):
        Path("file").write_text("x")
        broken(True)
        result = invoke("run", "one.toml", "--bundles", "file/below")
        assert result.exit_code == 1
        assert "No bundle of one in file/below: Not a directory." in result.stderr
        assert "FAIL" in result.stdout


class TestTrace:
    def test_trace_of_one_case_is_a_file(self, invoke):
        """Even of a case that passes."""
        assert invoke("run", "one.toml", "--trace", "t.json").exit_code == 0
        assert json.loads(Path("t.json").read_text())["traceName"] == "one"

    def test_traces_of_several_cases_are_a_folder(self, invoke):
        assert invoke("run", "several.toml", "--trace", "traces").exit_code == 0
        names = sorted(path.name for path in Path("traces").iterdir())
        assert names == ["0000-several_seed=1.json", "0001-several_seed=2.json"]

    def test_fingerprints_of_a_folder_of_traces(self, invoke):
        Path("stages.toml").write_text(STAGES)
        ran = invoke("run", "stages.toml", "--trace", "traces")
        assert "traces: 4 files in the folder traces; " in ran.stdout
        found = json.loads(invoke("fingerprint", "traces", "--json").stdout)["fingerprints"]
        assert [(each["source"], each["stage"]) for each in found] == [
            ("traces/0000-stages_stage=0.json", "stage 0"),
            ("traces/0001-stages_stage=1.json", "stage 1 or 2"),
            ("traces/0002-stages_stage=2.json", "stage 1 or 2"),
            ("traces/0003-stages_stage=3.json", "stage 3"),
        ]

    def test_fingerprint_of_a_folder_without_traces_is_refused(self, invoke):
        Path("traces").mkdir()
        result = invoke("fingerprint", "traces")
        assert result.exit_code == 2
        assert "expected traces or dumps in the folder traces" in result.stderr

    def test_unwritable_trace_path_is_a_usage_error(self, invoke):
        Path("folder").mkdir()
        result = invoke("run", "one.toml", "--trace", "folder")
        assert result.exit_code == 2
        assert "No trace of one: expected to write a trace to folder" in result.stderr
        assert "1 passed" in result.stdout


class TestReplay:
    def test_replay_as_json(self, invoke, bundle):
        result = invoke("replay", bundle[:6], "--json")
        report = json.loads(result.stdout)
        assert (report["id"], report["outcome"], report["exit_status"]) == (bundle, "fixed", 0)
        assert report["then"]["check"].startswith("equality.")
        assert report["now"] is None

    def test_bundle_is_replayed_by_path(self, invoke, bundle):
        path = Path(".zero-sim/bundles", bundle).rename("elsewhere")
        assert invoke("replay", path).stdout.startswith(f"FIXED  {bundle}")

    @pytest.mark.parametrize("command", [("replay",), ("export", "--chrome", "t.json")])
    def test_damaged_bundle_is_refused(self, invoke, bundle, command):
        with Path(".zero-sim/bundles", bundle, "events.jsonl").open("a") as file:
            file.write("x")
        result = invoke(command[0], bundle, *command[1:])
        assert result.exit_code == 2
        assert result.stderr.count("Error: ") == 1
        assert "bytes in events.jsonl, got" in result.stderr
        assert "Traceback" not in result.output

    def test_unknown_id_is_refused_with_the_known_ones(self, invoke, bundle):
        result = invoke("replay", "nothing")
        assert result.exit_code == 2
        assert bundle in result.stderr


class TestExport:
    def test_chrome_trace_and_flight_recorder_are_exported(self, invoke, bundle):
        options = ("--chrome", "t.json", "--flight-recorder", "dumps")
        assert invoke("export", bundle, *options).exit_code == 0
        assert json.loads(Path("t.json").read_text())["distributedInfo"]["world_size"] == 3
        assert sorted(path.name for path in Path("dumps").iterdir()) == [
            "rank_0",
            "rank_1",
            "rank_2",
        ]

    def test_export_without_a_format_is_refused(self, invoke, bundle):
        result = invoke("export", bundle)
        assert result.exit_code == 2
        assert "Try --chrome FILE or --flight-recorder DIR" in result.stderr
