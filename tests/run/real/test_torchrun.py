"""The command line under torchrun; every test starts several processes."""

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


def torchrun(count, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    return subprocess.run(
        [*command, "-m", "zero_sim", "run", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_four_ranks_judge_all_cases_and_one_prints(tmp_path):
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


def run_two(folder, target, *, seconds):
    for name in ("a", "b"):
        text = PLAIN.format(size=2, more=f"[run]\nstall_seconds = {seconds}\n")
        folder.joinpath(f"{name}.toml").write_text(text)
    return torchrun(2, folder, "--backend", "gloo", "--target", f"targets:{target}")


def test_hang_reports_the_call_of_every_rank_and_costs_one_case(tmp_path, with_enough_time):
    seconds, done = with_enough_time(
        lambda seconds: (seconds, run_two(tmp_path, "hangs_in_a", seconds=seconds)),
        seconds=3.0,
        # If time is short, a rank that is still starting is reported as hung, too.
        fits=lambda outcome: (
            "2 cases: 1 passed, 1 failed" in outcome[1].stdout
            and "group=self.aside" in outcome[1].stdout
            and "world.hung: 2 ranks" in outcome[1].stdout
        ),
    )
    assert done.returncode == 1, done.stderr
    assert f"world.hung: 2 ranks gave no sign of life for {seconds:g} s" in done.stdout
    assert "rank 0 was at:" in done.stdout
    assert "dist.all_reduce(torch.ones(7), group=self.aside)" in done.stdout
    # torch's own record of pending calls.
    assert "pending: gloo:all_gather, call 1, of [7] Float, scheduled" in done.stdout
    assert "2 cases: 1 passed, 1 failed" in done.stdout


def test_dead_rank_costs_one_case(tmp_path):
    done = run_two(tmp_path, "dies_in_a", seconds=600)
    assert done.returncode == 1, done.stderr
    assert "world.rank-died: rank 1: its process ended with exit status 3" in done.stdout
    assert "2 cases: 1 passed, 1 failed" in done.stdout
