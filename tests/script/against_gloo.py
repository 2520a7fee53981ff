"""Compare the output of scripts of `programs/` on gloo processes and on simulated ranks.

`python -m tests.script.against_gloo [NAME ...]` runs each script by torchrun and by `zero-sim
torchrun`, and compares every line of standard output of every rank exactly.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
PROCESS = Path(__file__).parent / "process.py"
ROOT = Path(__file__).parents[2]
HOW = {
    "eager": ("--timing", "eager"),
    "hostile": ("--timing", "hostile", "--races", "--schedule", "random", "--seed", "7"),
}
_OF_RANK = re.compile(r"\[rank (\d+)\]: (.*)")


@dataclass(frozen=True)
class Program:
    """A script, with its arguments and number of ranks."""

    name: str
    arguments: tuple[str, ...] = ()
    ranks: int = 4
    line_count: int = 1
    """Minimum number of lines that its ranks print together."""


COMPARED = (
    Program("gpt.py", line_count=15),
    Program("fsdp2.py", line_count=9),
    Program("tensor_parallel.py", line_count=12),
    Program("fsdp_tp.py", line_count=12),
    Program("tensor_by_hand.py", line_count=16),
    Program("pipeline.py", line_count=12),
    Program("zero_optimizer.py", line_count=15),
    Program("dcp_resume.py", line_count=24),
    Program("trainer.py", ("--config", str(PROGRAMS / "trainer.json")), line_count=6),
)


def on_gloo(program: Program, folder: Path) -> dict[int, list[str]]:
    """Return the lines that each rank prints as a process.

    Raises:
        RuntimeError: The run failed.
    """
    logs = folder / "logs"
    # Outside the folder of the run, because scripts search that folder for files.
    run = folder / "run"
    run.mkdir()
    words = (
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nproc-per-node={program.ranks}",
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
        *(f"--log-dir={logs}", "--redirects=3", str(PROCESS)),
    )
    _run(words, program, run, logs)
    files = logs.glob("*/attempt_0/*/stdout.log")
    return {int(file.parent.name): file.read_text().splitlines() for file in files}


def on_simulated_ranks(program: Program, folder: Path, *options: str) -> dict[int, list[str]]:
    """Return the lines that each rank prints in a simulated world that adds like gloo.

    Raises:
        RuntimeError: The run failed.
    """
    words = (
        *(sys.executable, "-m", "zero_sim", "torchrun", "--order", "gloo"),
        *(f"--nproc-per-node={program.ranks}", *options),
    )
    return by_rank(_run(words, program, folder), program.ranks)


def by_rank(printed: str, ranks: int) -> dict[int, list[str]]:
    """Split the output of `zero-sim torchrun` by rank."""
    lines: dict[int, list[str]] = {rank: [] for rank in range(ranks)}
    for line in printed.splitlines():
        if told := _OF_RANK.fullmatch(line):
            lines[int(told[1])].append(told[2])
    return lines


def _run(words: tuple[str, ...], program: Program, folder: Path, logs: Path | None = None) -> str:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), environment.get("PYTHONPATH")))
    )
    done = subprocess.run(
        [*words, str(PROGRAMS / program.name), *program.arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        told = [file.read_text() for file in logs.glob("**/stderr.log")] if logs else []
        raise RuntimeError(
            f"{program.name}: status {done.returncode}\n{done.stderr}{''.join(told)}"
        )
    return done.stdout


def difference(real: dict[int, list[str]], simulated: dict[int, list[str]]) -> str:
    """Describe the first line that differs; empty if all lines are equal."""
    for rank in sorted(real.keys() | simulated.keys()):
        mine, theirs = simulated.get(rank, []), real.get(rank, [])
        for number, (a, b) in enumerate(zip(mine, theirs, strict=False), start=1):
            if a != b:
                return f"rank {rank}, line {number}: simulated {a!r}, gloo {b!r}"
        if len(mine) != len(theirs):
            return f"rank {rank}: simulated {len(mine)} lines, gloo {len(theirs)}"
    return ""


def compare(program: Program, folder: Path) -> tuple[list[str], int, dict[str, float]]:
    """Run a script on gloo and in every simulated setting.

    Returns:
        Differences, the number of lines compared, and seconds per setting.
    """
    seconds: dict[str, float] = {}
    started = time.monotonic()
    real = on_gloo(program, folder)
    seconds["gloo"] = time.monotonic() - started
    lines = sum(map(len, real.values()))
    found = []
    if lines < program.line_count:
        found.append(f"gloo: expected {program.line_count} lines at least, got {lines}")
    for how, options in HOW.items():
        own = folder / how
        own.mkdir()
        started = time.monotonic()
        told = difference(real, on_simulated_ranks(program, own, *options))
        seconds[how] = time.monotonic() - started
        if told:
            found.append(f"{how}: {told}")
    return found, lines, seconds


def main(names: list[str]) -> int:
    """Compare the named scripts, or all, and print a row for each."""
    chosen = [each for each in COMPARED if not names or each.name in names]
    if unknown := set(names) - {each.name for each in COMPARED}:
        print(f"expected scripts among {', '.join(each.name for each in COMPARED)}; got {unknown}")
        return 2
    wrong = 0
    print(f"{'script':22} ranks lines   gloo  eager hostile  (seconds, of the wall)")
    for program in chosen:
        with tempfile.TemporaryDirectory() as folder:
            found, lines, seconds = compare(program, Path(folder))
        wrong += bool(found)
        taken = " ".join(f"{value:6.1f}" for value in seconds.values())
        print(
            f"{program.name:22} {program.ranks:5} {lines:5} {taken}  "
            f"{'; '.join(found) or 'every line equal'}",
            flush=True,
        )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
