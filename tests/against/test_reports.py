"""Reports of verdicts on a script: page, JSON, JUnit XML, and bundles that are judged again."""

import json
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from click.testing import CliRunner

from tests.against.conftest import TINY
from tests.against.test_traps import STEP
from zero_sim.cli.main import main


@pytest.fixture
def script(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("part.py").write_text("FACTOR = 1 + 1e-6\n")
    Path("data.txt").write_text("left behind")
    code = STEP.format(between="average(); model[0].bias.grad.mul_(part.FACTOR if rank else 1)")
    Path("train.py").write_text("import part\n" + TINY + code)
    return "train.py"


def invoke(*words):
    return CliRunner().invoke(main, list(map(str, words)), catch_exceptions=False)


def judge(script, *words):
    return invoke("torchrun", "--against", "1", "--nproc-per-node", 2, *words, script)


def test_reports_agree_with_the_text(script):
    files = ("--json", "v.json", "--junit", "v.xml", "--html", "v.html")
    done = judge(script, *files)
    assert done.exit_code == 1
    headline = done.output.splitlines()[0]
    assert headline == "DIFFERENT: first at step 1, gradient at Optimizer.step: 0.bias"
    schema = json.loads(invoke("schema", "torchrun").stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    told = json.loads(Path("v.json").read_text())
    jsonschema.validate(told, schema)
    (verdict,) = told["verdicts"]
    assert verdict["outcome"] == "different"
    assert verdict["differences"][0]["tensor"] == "0.bias"
    assert verdict["first"]["ranks"] == [1]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**told, "more": 1}, schema)
    (case,) = ElementTree.parse("v.xml").iter("testcase")
    assert case.find("failure").get("message") == headline
    page = Path("v.html").read_text()
    assert headline in page
    assert verdict["command"] in page
    assert "<script" not in page


def test_command_of_a_verdict_has_the_options_of_its_run(script):
    options = ("--own-modules", "json", "--seed", "3", "--allow-drift", "loss", "--timing", "lazy")
    done = judge(script, *options)
    (line,) = (line for line in done.output.splitlines() if line.startswith("  repeat: "))
    command = shlex.split(line.removeprefix("  repeat: zero-sim "))
    assert CliRunner().invoke(main, command).output == done.output
    for flag, value in zip(options[::2], options[1::2], strict=True):
        assert command[command.index(flag) + 1] == value


def test_page_contains_the_buffer_map_of_a_partial_difference(script):
    code = (
        Path(script).read_text().replace("model[0].bias.grad.mul_", "model[0].bias.grad[2:4].mul_")
    )
    Path(script).write_text(code)
    judge(script, "--html", "v.html")
    assert "<svg" in Path("v.html").read_text()


def test_bundle_is_judged_again(script):
    done = judge(script, "--bundles", "kept")
    (name,) = re.findall(r"replay: zero-sim replay --bundles kept (\w{12}) --trust", done.output)
    code = Path("kept", name, "code")
    assert sorted(path.name for path in code.iterdir()) == ["part.py", "train.py"]
    Path(script).unlink()
    assert judge_again(name).output.startswith("FAILED as in the bundle\nDIFFERENT")
    (code / "part.py").write_text("FACTOR = 2\n")
    assert judge_again(name).exit_code == 1
    (code / "part.py").write_text("FACTOR = 1\n")
    done = judge_again(name[:5])
    assert done.output.startswith("FIXED\nEQUAL")
    assert done.exit_code == 0


def judge_again(name):
    return invoke("replay", "--bundles", "kept", name, "--trust")


def test_bundle_code_does_not_run_without_trust(script):
    judge(script, "--bundles", "kept")
    (path,) = Path("kept").iterdir()
    (path / "code" / "train.py").write_text("open('ran', 'w')")
    done = invoke("replay", path)
    assert done.exit_code == 2
    assert "--trust" in done.output
    assert not list(Path().glob("**/ran"))


def test_bundle_of_a_newer_version_is_refused(script):
    judge(script, "--bundles", "kept")
    (path,) = Path("kept").iterdir()
    head = json.loads((path / "script.json").read_text())
    for change, wanted in (
        ({"version": 2}, "Upgrade"),
        ({"seed": "0"}, "seed"),
        ({"format": ""}, "bundle"),
    ):
        (path / "script.json").write_text(json.dumps({**head, **change}))
        done = invoke("replay", path, "--trust")
        assert done.exit_code == 2
        assert wanted in done.output
