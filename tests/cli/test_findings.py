"""`zero-sim explain`, `zero-sim report` and `zero-sim replay --freeze`, end to end."""

import json
from pathlib import Path

import pytest

from tests.cli.ended import assert_ended


class TestExplain:
    def test_check_is_explained(self, invoke):
        result = invoke("explain", "world.race")
        assert result.exit_code == 0
        assert result.stdout.startswith("world.race\n  meaning ")
        assert "PyTorch#144535" in result.stdout

    def test_bundle_is_explained_with_its_values(self, invoke, bundle):
        result = invoke("explain", bundle[:6])
        assert result.stdout.startswith(f"bundle {bundle}  one\n  equality.")
        assert "ulp apart" in result.stdout
        assert "flat buffer 0, " in result.stdout
        assert "  causes    - " in result.stdout

    def test_json(self, invoke, bundle):
        plain = json.loads(invoke("explain", "guard.same-data", "--json").stdout)
        assert (plain["check"], plain["bundle"], plain["finding"]) == (
            "guard.same-data",
            None,
            None,
        )
        of = json.loads(invoke("explain", bundle, "--json").stdout)
        assert (of["bundle"], of["finding"]["check"]) == (bundle, of["check"])
        assert of["strip"]["elems"] > 0

    def test_unknown_check_is_refused_with_the_known_ones(self, invoke, bundle):
        result = invoke("explain", "equality.gard")
        assert result.exit_code == 2
        assert "got 'equality.gard'. Checks: equality.grad, " in result.stderr
        assert "equality.grad" in result.stderr
        assert bundle in result.stderr


class TestReport:
    def test_all_bundles_of_a_folder_are_one_page(self, invoke, bundle):
        result = invoke("report", "--output", "out/page.html")
        assert (result.exit_code, result.stdout) == (0, "out/page.html: 1 failed case\n")
        page = Path("out/page.html").read_text()
        assert f"zero-sim replay {bundle}" in page
        assert 'class="timeline"' in page

    def test_report_without_bundles_is_refused(self, invoke):
        assert_ended(invoke("report"), 2, "expected bundles, got none", on="stderr")

    def test_unwritable_page_is_refused(self, invoke, bundle):
        Path("file").write_text("x")
        result = invoke("report", bundle, "--output", "file/page.html")
        assert_ended(result, 2, "expected to write a page", on="stderr")


class TestFreeze:
    def test_frozen_case_runs(self, invoke, bundle, broken):
        result = invoke("replay", bundle, "--freeze")
        (path,) = Path("scenarios/regressions").iterdir()
        told = [f"  frozen: {path}", f"  reproduce: zero-sim run {path}"]
        assert result.stdout.splitlines()[-2:] == told
        assert invoke("run", path).exit_code == 0
        broken(True)
        again = json.loads(invoke("run", path, "--json").stdout)["cases"][0]
        assert (again["verdict"], again["bundle"]) == ("fail", bundle)

    def test_existing_file_is_replaced_only_with_force(self, invoke, bundle):
        def freeze(*more):
            options = ("--freeze", "--folder", "kept", "--name", "mine", *more)
            return invoke("replay", bundle, *options)

        assert freeze("--json").exit_code == 0
        assert_ended(freeze(), 2, "kept/mine.toml: expected a new file", on="stderr")
        assert freeze("--force").exit_code == 0

    def test_json_contains_the_frozen_path(self, invoke, bundle):
        assert json.loads(invoke("replay", bundle, "--json").stdout)["frozen"] is None
        report = json.loads(invoke("replay", bundle, "--freeze", "--json").stdout)
        assert Path(report["frozen"]).exists()


@pytest.mark.parametrize("command", ["explain", "report"])
def test_help_is_printed(invoke, command):
    assert invoke(command, "--help").exit_code == 0
