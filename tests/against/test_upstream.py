"""Scripts of known faults in accelerate: outcomes as on their pages. Skipped without accelerate."""

import shutil
from pathlib import Path

import pytest

from zero_sim.against.runs import Side
from zero_sim.against.verdict import judge, prepare
from zero_sim.script.launch import Settings

pytest.importorskip("accelerate")
UPSTREAM = Path(__file__).parents[2] / "scenarios" / "upstream"
OUTCOMES = {
    "accelerate-ddp-empty-params": ("script-fails", "Missing key(s) in state_dict"),
    "accelerate-fsdp2-checkpointing": ("different", "'NoneType' object is not callable"),
    "accelerate-fsdp2-containers": ("different", "fully_shard does not support containers"),
    "accelerate-fsdp2-root-params": ("different", "not enough values to unpack"),
    "accelerate-fsdp2-stale-state": ("different", ""),
    "accelerate-fsdp2-tied": ("different", "is shared with a parameter already managed"),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_outcome_is_as_on_its_page(name, tmp_path, monkeypatch):
    shutil.copy(UPSTREAM / f"{name}.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    one, several = (
        Side(
            settings=Settings(ranks_per_node=count, packages=("accelerate",)),
            name=f"{name}.py",
            is_module=False,
            arguments=(),
        )
        for count in (1, 2)
    )
    verdict = judge(prepare(one, seed=0), several).verdict
    outcome, words = OUTCOMES[name]
    assert verdict.outcome == outcome
    assert words in verdict.reason
