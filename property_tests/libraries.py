"""Campaigns on targets of installed libraries, with cases on gloo and recovered rules.

`python -m property_tests.libraries --cases 200 --gloo 40`, as `make libraries` does.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.rules.found import find_rules
from zero_sim.rules.judging import EXPLAINER
from zero_sim.run.judges import Chosen, open_judge
from zero_sim.scenario.dump import to_chosen_toml
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import Target, find_target, library_target_names, why_missing

RANKS_MAX = 4


def installed(names: list[str]) -> list[str]:
    """Return targets whose library is installed, without those with known divergences."""
    asked = names or [name for name in library_target_names() if not name.endswith("-as-is")]
    missing = [why for name in asked if (why := why_missing(find_target(name)))]
    for why in sorted(set(missing)):
        print(f"left out: {why}")
    return [name for name in asked if not why_missing(find_target(name))]


def fuzzed(name: str, *, cases: int, seed: int) -> bool:
    """Run a campaign and return True if it finds nothing."""
    with tempfile.TemporaryDirectory() as corpus:
        words = ["fuzz", "--target", name, "--cases", str(cases), "--seed", str(seed)]
        ran = subprocess.run(
            [sys.executable, "-m", "zero_sim", *words, "--corpus", corpus],
            capture_output=True,
            text=True,
            check=False,
        )
    lines = [line for line in ran.stdout.splitlines() if line.strip()]
    print(f"{name}: {lines[-1] if lines else ran.stderr}", flush=True)
    if ran.returncode:
        print(ran.stdout)
    return ran.returncode == 0


def drawn_for(target: Target, *, cases: int, seed: int) -> Iterator[Scenario]:
    """Draw cases that gloo processes can run as well."""
    strategy = drawn_cases(target, ranks_max=RANKS_MAX, reload=False)
    yield from islice(draws(strategy, seed=f"libraries/{seed}"), cases)


def same_on_gloo(name: str, *, cases: int, seed: int) -> bool:
    """Judge drawn cases on simulated and gloo ranks; return True if all verdicts agree."""
    target, verdicts, different = find_target(name), Counter(), []
    chosen = Chosen(explainer=EXPLAINER)
    with open_judge(chosen) as simulated, open_judge(chosen, backend="gloo") as real:
        for case in drawn_for(target, cases=cases, seed=seed):
            here, there = simulated(case), real(case)
            verdicts[here.verdict] += 1
            checks = [tuple(f.check for f in each.findings) for each in (here, there)]
            if here.verdict != there.verdict or checks[0] != checks[1]:
                different.append((case, here, there))
    told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    print(f"{name}: {sum(verdicts.values())} cases on both, {told}; {len(different)} differ")
    for case, here, there in different:
        print(to_chosen_toml(case))
        for where, result in (("simulated", here), ("gloo", there)):
            said = [f"{finding.check}: {finding.message}" for finding in result.findings]
            print(f"  {where}: {result.verdict} {'; '.join(said) or result.error}", flush=True)
    return not different


def rules_recovered(name: str) -> bool:
    """Recover a target's rules and return True if none contradicts its declarations."""
    found = find_rules(find_target(name))
    print(f"{name}: rules by {found.cases} runs, {len(found.contradicted)} as declared otherwise")
    for said in found.contradicted:
        print(f"  {said}", flush=True)
    return not found.contradicted


def main() -> int:
    """Run the requested checks and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="targets; all that are installed if left out")
    parser.add_argument("--cases", type=int, default=200, help="of each campaign")
    parser.add_argument("--gloo", type=int, default=40, help="cases on gloo processes, of each")
    parser.add_argument("--rules", action="store_true", help="work out their rules, too")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    names = installed(options.names)
    ok = True
    for name in names:
        if options.cases:
            ok &= fuzzed(name, cases=options.cases, seed=options.seed)
        if options.gloo:
            ok &= same_on_gloo(name, cases=options.gloo, seed=options.seed)
        if options.rules:
            ok &= rules_recovered(name)
    return 0 if ok and names else 1


if __name__ == "__main__":
    sys.exit(main())
