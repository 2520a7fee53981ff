"""A save killed at any point leaves a readable checkpoint, the old or the new one.

SIGKILL ends a real process before each fsync, rename, mkdir, rmdir and unlink.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("form", ["sharded", "consolidated"])
def test_save_killed_at_any_call_leaves_old_or_new_checkpoint(run_ranks, kit, tmp_path, form):
    """Before the rename the old one is complete, after it the new one; never a mixture."""
    old = tmp_path / "old" / "checkpoint"

    def save_old(rank):
        run = kit.build().train(2)
        kit.save(old, run, form=form)
        before = run.facts()
        return before, run.train(1).facts()

    facts = run_ranks(2, save_old)
    done = subprocess.run(
        [sys.executable, HERE / "crashing.py", HERE / "conftest.py", tmp_path, form],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
    )
    assert done.returncode == 0, done.stderr
    killed = int(done.stdout)
    assert killed >= 10

    def load(path):
        return lambda rank: kit.load(path, kit.build()).facts()

    def save_and_load(path):
        def program(rank):
            kit.save(path, kit.build().train(3), form=form)
            return kit.load(path, kit.build()).facts()

        return program

    wanted = [[rank[0] for rank in facts], [rank[1] for rank in facts]]
    seen, cleared = [], set()
    for n in range(killed + 1):
        path = tmp_path / str(n) / "checkpoint"
        got = run_ranks(3, load(path))
        # The step count of the module identifies the checkpoint; everything else must match it.
        is_new = int(got[0][1]["count"]) == 3
        kit.assert_same_runs(got, wanted[is_new])
        seen.append(is_new)
        # The next save removes leftovers of the crash. Check each kind once.
        left = frozenset(entry.name for entry in path.parent.iterdir())
        if left in cleared:
            continue
        cleared.add(left)
        kit.assert_same_runs(run_ranks(2, save_and_load(path)), wanted[1])
        assert [entry.name for entry in path.parent.iterdir()] == ["checkpoint"]
    assert {"checkpoint"} in cleared
    assert {".checkpoint.previous", ".checkpoint.saving"} in cleared
    assert seen == sorted(seen), "once the new one is there, it stays"
    assert not seen[0]
    assert seen[-1]
