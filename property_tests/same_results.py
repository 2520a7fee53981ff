"""A script that holds two checkouts against each other: the same cases, the same results.

    python property_tests/same_results.py OTHER_CHECKOUT [--drawn 2000] [--seed 0] [SCENARIOS...]

For changes that must not change what users see: every case of the scenario files and a number of
drawn ones run in both checkouts, each in a process of its own. Verdict, findings, notes, compared
elements, collectives and event logs must be equal; lines of source in them are left out, as they
move.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
_SITE = re.compile(r"\S+\.py:\d+( in \S+)?")


def main() -> int:
    """Compare, or, as the other process, run the cases of one checkout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="a checkout to compare this one with")
    parser.add_argument("paths", nargs="*", help="scenario files; else all that are shipped here")
    parser.add_argument("--drawn", type=int, default=200, help="how many cases are drawn besides")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if options.run:
        for line in _results(options.paths):
            print(line, flush=True)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        drawn = _draw(Path(folder), count=options.drawn, seed=options.seed)
        shipped = options.paths or [str(path) for path in sorted(HERE.glob("scenarios/**/*.toml"))]
        return _compare(options.other.resolve(), paths=[*shipped, *drawn])


def _draw(folder: Path, *, count: int, seed: int) -> list[str]:
    """Write drawn cases as scenario files; they follow from the seed and this checkout."""
    from itertools import islice

    from zero_sim.fuzz.drawing import draws
    from zero_sim.fuzz.strategies import drawn_cases
    from zero_sim.scenario.dump import to_toml

    paths = []
    for index, scenario in enumerate(islice(draws(drawn_cases(), seed=f"same/{seed}"), count)):
        path = folder / f"drawn-{index}.toml"
        path.write_text(to_toml(scenario))
        paths.append(str(path))
    return paths


def _compare(other: Path, *, paths: list[str]) -> int:
    processes = [_start(root, paths) for root in (HERE, other)]
    differing = total = 0
    for path in paths:
        ours, theirs = (_read(process) for process in processes)
        for case in ours.keys() | theirs.keys():
            total += 1
            if ours.get(case) != theirs.get(case):
                differing += 1
                print(f"{path}: {case}")
                for what, root in ((ours, HERE), (theirs, other)):
                    print(f"  {root}: {json.dumps(what.get(case))[:2000]}")
    for process in processes:
        if process.wait() != 0:
            raise SystemExit(f"expected exit status 0 of {process.args}, got {process.returncode}")
    print(f"{total} cases, {differing} differ")
    return 1 if differing else 0


def _start(root: Path, paths: list[str]) -> subprocess.Popen[str]:
    script = str(Path(__file__).resolve())
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as names:
        json.dump(paths, names)
    return subprocess.Popen(
        [sys.executable, script, str(root), f"@{names.name}", "--run"],
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
    )


def _read(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"expected results of one more file from {process.args}, got none")
    return json.loads(line)


def _results(paths: list[str]) -> Iterator[str]:
    """A line of JSON a file: by case what came of it."""
    import torch

    from zero_sim import run_case
    from zero_sim.scenario.load import load_cases

    torch.set_num_threads(1)
    names = json.loads(Path(paths[0][1:]).read_text())
    os.unlink(paths[0][1:])
    with ExitStack() as stack:
        pool = stack.enter_context(_pool())
        for path in names:
            results = {}
            for scenario in load_cases(path):
                result = run_case(scenario, pool=pool, keep_logs=True)
                told = result.as_dict()
                for name in ("seconds", "log_digest"):
                    del told[name]
                told["log"] = _digest(result.logs)
                results[result.id] = _without_sites(told)
            yield json.dumps(results)


def _pool():
    """Worlds kept open, wherever the checkout has them."""
    try:
        from zero_sim.backends import WorldPool
    except ImportError:
        from zero_sim.launch import WorldPool
    return WorldPool()


def _digest(logs: Iterable) -> str:
    state = hashlib.sha256()
    for log in logs:
        for record in log.collectives:
            state.update(repr(tuple(record._replace(file="", line=0))).encode())
        for moment in log.moments:
            state.update(repr(tuple(moment)).encode())
        state.update(repr(log.turns).encode())
    return state.hexdigest()


def _without_sites(told: object) -> object:
    if isinstance(told, dict):
        return {
            name: _without_sites(value)
            for name, value in told.items()
            if name not in ("file", "line", "call_site")
        }
    if isinstance(told, list):
        return [_without_sites(value) for value in told]
    return _SITE.sub("a line", told) if isinstance(told, str) else told


if __name__ == "__main__":
    sys.exit(main())
