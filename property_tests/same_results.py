"""A script that runs the same cases in two checkouts and compares the results.

    python property_tests/same_results.py OTHER_CHECKOUT [--drawn 2000] [--seed 0] [SCENARIOS...]

Run it for changes that must keep all results. Each checkout runs in a separate process:

- every case of the scenario files, and --drawn cases of our own system
- --drawn-per-target cases of each of torch's engines
- --drawn-on-gloo cases with a process per rank
- the recorded smallest case of every mutant, with the mutant

Verdicts, findings, notes, compared elements, collectives and event logs must be equal. Lines of
source are omitted, because they move. Mutants that only one checkout has are listed.
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
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
MUTANT, GLOO = "mutant:", "gloo:"
"""Prefixes of jobs; a job without one is a scenario file to simulate."""
CHARS_MAX = 600
"""Longest excerpt that is printed of a differing result."""
_TRACE = "Traceback (most recent call last):"
_SCRATCH = re.compile(r"\S*/zero-sim-\w{8}\b")
_SITE = re.compile(r"\S+\.py:\d+( in \S+)?")


def main() -> int:
    """Compare two checkouts or, as their child process, run the jobs of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="a checkout to compare this one with")
    parser.add_argument("paths", nargs="*", help="scenario files; else all that are shipped here")
    parser.add_argument("--drawn", type=int, default=200, help="cases of our own system")
    parser.add_argument("--drawn-per-target", type=int, default=200, help="of each torch target")
    parser.add_argument("--drawn-on-gloo", type=int, default=50)
    parser.add_argument("--no-mutants", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if options.run:
        for line in _results(options.paths):
            print(line, flush=True)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        jobs = options.paths or [str(path) for path in sorted(HERE.glob("scenarios/**/*.toml"))]
        jobs += _draw(Path(folder), "zero_sim", count=options.drawn, seed=options.seed)
        for name in _torch_targets():
            jobs += _draw(Path(folder), name, count=options.drawn_per_target, seed=options.seed)
        on_gloo = _draw(Path(folder), "zero_sim", count=options.drawn_on_gloo, seed=~options.seed)
        jobs += [GLOO + path for path in on_gloo]
        jobs += [] if options.no_mutants else [MUTANT + name for name in _mutants()]
        return _compare(options.other.resolve(), jobs=jobs)


def _torch_targets() -> list[str]:
    from zero_sim.targets import target_names

    return [name for name in target_names() if name.startswith("torch-")]


def _mutants() -> list[str]:
    from zero_sim.mutants.smallest import smallest_cases

    return sorted(smallest_cases())


def _draw(folder: Path, target: str, *, count: int, seed: int) -> list[str]:
    """Write drawn cases as scenario files, determined by the seed and this checkout."""
    from dataclasses import replace
    from itertools import islice

    from zero_sim.fuzz.drawing import draws
    from zero_sim.fuzz.strategies import drawn_cases
    from zero_sim.scenario.dump import to_toml
    from zero_sim.targets import find_target

    paths = []
    # Campaigns of our own system name no target, which changes their draws.
    drawn = drawn_cases() if target == "zero_sim" else drawn_cases(find_target(target))
    for index, scenario in enumerate(islice(draws(drawn, seed=f"same/{seed}"), count)):
        system = replace(scenario.system, target=target)
        path = folder / f"{target}-{seed}-{index}.toml"
        path.write_text(to_toml(replace(scenario, system=system)))
        paths.append(str(path))
    return paths


def _compare(other: Path, *, jobs: list[str]) -> int:
    processes = [_start(root, jobs) for root in (HERE, other)]
    differing = total = 0
    for job in _batches(jobs):
        ours, theirs = (_read(process) for process in processes)
        for case in ours.keys() | theirs.keys():
            total += 1
            if ours.get(case) != theirs.get(case):
                differing += 1
                print(f"{job}: {case}")
                for results, root in ((ours, HERE), (theirs, other)):
                    print(f"  {root}: {json.dumps(results.get(case))[:CHARS_MAX]}")
    for process in processes:
        if process.wait() != 0:
            raise SystemExit(f"expected exit status 0 of {process.args}, got {process.returncode}")
    print(f"{total} cases, {differing} differ")
    return 1 if differing else 0


def _start(root: Path, jobs: list[str]) -> subprocess.Popen[str]:
    script = str(Path(__file__).resolve())
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as names:
        json.dump(jobs, names)
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
        raise SystemExit(f"expected results of one more job from {process.args}, got none")
    return json.loads(line)


def _batches(jobs: list[str]) -> list[str]:
    """Group jobs into batches, one line of results each; all gloo jobs share the last."""
    alone = [job for job in jobs if not job.startswith(GLOO)]
    return [*alone, GLOO] if len(alone) < len(jobs) else alone


def _results(paths: list[str]) -> Iterator[str]:
    """Run jobs and yield a line of JSON per batch: results by case id."""
    import torch

    from zero_sim.backends.worlds import WorldPool
    from zero_sim.scenario.load import load_cases

    torch.set_num_threads(1)
    jobs = json.loads(Path(paths[0][1:]).read_text())
    os.unlink(paths[0][1:])
    with WorldPool() as pool:
        for job in _batches(jobs):
            if job == GLOO:
                results = _on_gloo([each.removeprefix(GLOO) for each in jobs if GLOO in each])
            elif job.startswith(MUTANT):
                results = _of_mutant(job.removeprefix(MUTANT), pool)
            else:
                results = {case.name: _judged(case, pool) for case in load_cases(job)}
            yield json.dumps(results)


def _of_mutant(name: str, pool: object) -> dict[str, object]:
    """Return the result of a mutant's smallest case, or none if this checkout lacks the mutant."""
    from zero_sim.mutants import find_mutants
    from zero_sim.mutants.smallest import smallest_cases

    case = smallest_cases().get(name)
    if case is None:
        return {}
    (one,) = find_mutants([name])
    with one.apply():
        return {name: _judged(case, pool)}


def _judged(scenario: object, pool: object) -> object:
    from zero_sim import run_case

    result = run_case(scenario, pool=pool, keep_logs=True)
    record = result.as_dict()
    for name in ("seconds", "log_digest"):
        del record[name]
    record["log"] = _digest(result.logs)
    return _without_sites(record)


def _on_gloo(paths: list[str]) -> dict[str, object]:
    command = [sys.executable, "-m", "zero_sim", "run", "--backend", "gloo", "--no-bundles"]
    done = subprocess.run([*command, "--json", *paths], capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"expected a report of the cases on gloo, got {done.stderr[-2000:]}")
    cases = json.loads(done.stdout)["cases"]
    changing = ("seconds", "log_digest", "reproduce", "source", "bundle")
    for case in cases:
        for name in changing:
            case.pop(name, None)
    return {case["id"]: _without_sites(case) for case in cases}


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
    if not isinstance(told, str):
        return told
    # Keep only the error at the end of a traceback, because frames move with the code.
    text = "Traceback\n" + told.rstrip().splitlines()[-1] if told.startswith(_TRACE) else told
    return _SITE.sub("a line", _SCRATCH.sub("a folder", text))


if __name__ == "__main__":
    sys.exit(main())
