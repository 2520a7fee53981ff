"""`zero-sim run --order`: sums judged by bounds, and orders that targets do not support."""

from pathlib import Path

import pytest

from tests.cli.ended import assert_ended
from zero_sim.bundle import read_bundle

FOUR = 'schema = 1\n[model]\nname = "mlp"\ndtype = "bf16"\n[world]\nsize = 4\n'
PLAIN_TARGET = """
class Mine:
    name = "mine"

    def build(self, module, *, scenario, group):
        raise NotImplementedError
"""
RELOAD = "[reload]\nstep = 1\n"


def test_sums_are_judged_by_bounds(invoke):
    Path("four.toml").write_text(FOUR)
    result = invoke("run", "four.toml", "--order", "any")
    assert_ended(result, 0, "note: bounds: a sum may differ from the exact one by 0.012 x")


def test_case_that_needs_an_order_is_omitted(invoke):
    Path("four.toml").write_text(FOUR)
    Path("reload.toml").write_text(FOUR + RELOAD)
    result = invoke("run", "four.toml", "reload.toml", "--order", "any")
    assert_ended(result, 0, "1 case left out: its order must be known, because it has a reload")


def test_bundle_contains_the_case_that_ran(invoke, broken):
    Path("four.toml").write_text(FOUR)
    broken(True)
    assert invoke("run", "four.toml", "--order", "any").exit_code == 1
    (path,) = Path(".zero-sim/bundles").iterdir()
    assert not read_bundle(path).scenario.world.order_known
    assert invoke("replay", path.name).exit_code == 1
    broken(False)
    assert invoke("replay", path.name).output.startswith("FIXED")


class TestUnsupportedOrder:
    """Sums of torch's own systems depend on positions that they do not report."""

    TARGET = (
        'schema = 1\n[model]\nname = "mlp"\n[world]\nsize = 2\n[system]\ntarget = "torch-ddp"\n'
    )
    PLAIN = TARGET + "stage = 0\n"
    WRITTEN = PLAIN.replace("size = 2", 'size = 2\norder = "ring"')
    REASON = "1 case left out: target 'torch-ddp' does not support world.order = 'gloo'"

    def test_unsupported_case_is_omitted(self, invoke):
        Path("four.toml").write_text(FOUR)
        Path("ddp.toml").write_text(self.PLAIN)
        result = invoke("run", "four.toml", "ddp.toml", "--order", "gloo")
        assert result.exit_code == 0, result.output
        assert result.output.splitlines()[-1] == self.REASON

    def test_only_unsupported_cases_have_exit_status_5(self, invoke):
        Path("ddp.toml").write_text(self.PLAIN)
        result = invoke("run", "ddp.toml", "--order", "gloo")
        assert_ended(result, 5, "Nothing selected: no case that can be judged with these options")
        assert self.REASON in result.output

    def test_imported_target_is_checked(self, invoke, monkeypatch):
        monkeypatch.syspath_prepend(str(Path.cwd()))
        Path("a_plain_target.py").write_text(PLAIN_TARGET)
        Path("four.toml").write_text(self.PLAIN.replace("torch-ddp", "zero_sim"))
        result = invoke("run", "four.toml", "--order", "ring", "--target", "a_plain_target:Mine")
        assert_ended(result, 5, "target 'mine' does not support world.order = 'ring'")

    @pytest.mark.parametrize("options", [(), ("--order", "gloo")], ids=["as written", "asked"])
    def test_unsupported_order_in_the_file_is_an_error(self, invoke, options):
        Path("ddp.toml").write_text(self.WRITTEN)
        assert_ended(invoke("run", "ddp.toml", *options), 2, "world.order: this target supports")

    def test_case_runs_without_an_order(self, invoke):
        Path("ddp.toml").write_text(self.PLAIN)
        result = invoke("run", "ddp.toml", "--order", "any")
        assert result.exit_code == 0, result.output

    def test_case_that_needs_a_known_order_is_omitted(self, invoke):
        Path("ddp.toml").write_text(self.PLAIN + "[optimizer]\nclip_norm = 0.1\n")
        result = invoke("run", "ddp.toml", "--order", "any")
        assert_ended(result, 5, "target 'torch-ddp' must know its order: world.order_known")
