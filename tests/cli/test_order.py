"""`zero-sim run --order any`: judged without a word of how sums are added."""

from __future__ import annotations

from pathlib import Path

from zero_sim.bundle import read_bundle

FOUR = 'schema = 1\n[model]\nname = "mlp"\ndtype = "bf16"\n[world]\nsize = 4\n'
RELOAD = "[reload]\nstep = 1\n"


def test_sums_are_judged_by_bounds(invoke):
    Path("four.toml").write_text(FOUR)
    result = invoke("run", "four.toml", "--order", "any")
    assert result.exit_code == 0, result.output
    assert "note: bounds: a sum may end within 0.012 x" in result.output


def test_what_needs_an_order_is_left_out(invoke):
    Path("four.toml").write_text(FOUR)
    Path("reload.toml").write_text(FOUR + RELOAD)
    result = invoke("run", "four.toml", "reload.toml", "--order", "any")
    assert result.exit_code == 0, result.output
    assert "1 case left out: its order must be known: it has a reload" in result.output


def test_a_bundle_is_of_the_case_that_ran(invoke, broken):
    Path("four.toml").write_text(FOUR)
    broken(True)
    assert invoke("run", "four.toml", "--order", "any").exit_code == 1
    (path,) = Path(".zero-sim/bundles").iterdir()
    assert not read_bundle(path).scenario.world.order_known
    assert invoke("replay", path.name).exit_code == 1
    broken(False)
    assert invoke("replay", path.name).output.startswith("FIXED")
