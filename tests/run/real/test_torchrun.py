"""The command line under torchrun, as users start it; every test starts several processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

PLAIN = 'schema = 1\n[model]\nname = "mlp"\nhidden = 5\n[world]\nsize = {size}\n{more}'
MANY = """
[matrix]
"world.order" = ["gloo", "linear"]
"model.dtype" = ["fp32", "bf16"]
"""
CHANGED = "[reload]\nstep = 1\nworld_size = 4\n"


def torchrun(count, *arguments, module=True):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    return subprocess.run(
        [*command, *(["-m", "zero_sim", "run"] if module else []), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_four_ranks_judge_all_cases_and_one_speaks(tmp_path):
    cases = {
        "many": PLAIN.format(size=4, more=MANY),
        "fewer": PLAIN.format(size=3, more=CHANGED),
        "wide": PLAIN.format(size=5, more=""),
    }
    for name, text in cases.items():
        tmp_path.joinpath(f"{name}.toml").write_text(text)
    done = torchrun(4, tmp_path, "--backend", "gloo", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [case["verdict"] for case in told["cases"]] == ["pass"] * 5
    assert all(case["compared_elems"] > 1000 for case in told["cases"])
    assert told["left_out"] == {"more than 4 ranks": 1}


def test_a_hang_is_told_with_every_ranks_call_and_ends_the_run(tmp_path, with_enough_time):
    def attempt(seconds):
        for name in ("a", "b"):
            text = PLAIN.format(size=2, more=f"[run]\nstall_seconds = {seconds}\n")
            tmp_path.joinpath(f"{name}.toml").write_text(text)
        script = Path(__file__).with_name("hang_in_launch.py")
        return seconds, torchrun(2, script, tmp_path, "--backend", "gloo", module=False)

    seconds, done = with_enough_time(
        attempt, seconds=3.0, fits=lambda outcome: "time.sleep(600)" in outcome[1].stdout
    )
    assert done.returncode == 1
    assert f"world.hung: 2 ranks gave no sign of life for {seconds:g} s" in done.stdout
    assert "rank 0 was at:" in done.stdout
    assert "time.sleep(600)" in done.stdout
    assert "2 cases: 0 passed, 1 failed, 1 not run" in done.stdout
