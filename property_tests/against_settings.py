"""Correct settings and planted faults of the scripts in `tests/against/scripts`.

    python property_tests/against_settings.py [--right 300] [--faults] [--seed 0] [--part 0/4]

Prints, for each family of correct settings, the largest error as a multiple of rounding, and each
planted fault that is not found. Exits with 1 if a multiple exceeds RIGHT_MAX or a fault survives.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "tests" / "against" / "scripts"
RIGHT_MAX = 1000.0
"""Largest accepted multiple of rounding of a correct setting; the comparison's limit is 2.3e4."""
_OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adagrad", "lion")
_DTYPES = ("float32", "bfloat16")
CHOICES: dict[str, dict[str, tuple[object, ...]]] = {
    "ddp.py": {
        "dtype": _DTYPES,
        "optimizer": _OPTIMIZERS,
        "size": (0, 2),
        "clip": (0, 0.5),
        "view": (0, 1),
        "load": (0, 1),
    },
    "zero1.py": {
        "dtype": _DTYPES,
        "optimizer": _OPTIMIZERS,
        "bucket": (300, 2000, 100000),
        "clip": (0, 0.5),
    },
    "fsdp2.py": {
        "dtype": _DTYPES,
        "optimizer": _OPTIMIZERS,
        "size": (0, 2),
        "clip": (0, 0.5),
        "replicas": (1, 2),
        "reshard": (0, 1),
        "load": (0, 1),
        "by": (0, 0, 1),
    },
    "muon.py": {"dtype": _DTYPES, "size": (0, 2), "small": (100, 10000)},
    "fsdp1.py": {
        "dtype": _DTYPES,
        "optimizer": _OPTIMIZERS,
        "size": (0, 2),
        "clip": (0, 0.5),
        "strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"),
        "original": (0, 1),
    },
    "tensor_parallel.py": {"optimizer": _OPTIMIZERS, "tp": (2, 8), "clip": (0, 0.5)},
}
"""Values of each script's arguments in correct settings."""
_SHARE = {
    "ddp.py": 22,
    "zero1.py": 16,
    "fsdp2.py": 16,
    "muon.py": 5,
    "fsdp1.py": 10,
    "tensor_parallel.py": 6,
}
"""Share of each script, in settings per 75."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault planted into a script."""

    script: str
    arguments: str
    ranks: int = 4
    outcome: str = "different"
    """Expected verdict: inconclusive if ranks read different rows."""


def _faults() -> Iterator[Fault]:
    for name in (
        "shifted-load",
        "steps-lost-on-a-rank",
        "gradients-kept-on-a-rank",
        "never-synced",
        "loss-by-rank",
        "reduced-twice",
        "rank-factor",
        "element",
        "clip",
        "clip-eps",
        "norm-of-some",
        "norm-of-a-rank",
        "lr-on-a-rank",
        "decay-on-a-rank",
        "step-skipped-on-a-rank",
    ):
        yield Fault("ddp.py", f"fault={name}")
    yield Fault("ddp.py", "fault=accumulation-not-divided size=6")
    yield Fault("ddp.py", "fault=micro-dropped size=6", outcome="inconclusive")
    for name in (
        "order-by-rank",
        "tail-unreduced",
        "sum-for-mean",
        "no-copy-back",
        "norm-of-shard",
        "norm-twice",
        "gather-before-step",
        "own-shifted",
        "last-bucket-unreduced",
        "last-bucket-not-gathered",
        "stale-gradient",
    ):
        yield Fault("zero1.py", f"fault={name}")
    for name in (
        "divisor-of-a-block",
        "norm-of-shard",
        "lr-on-a-rank",
        "element",
        "shifted-load",
        "steps-lost-on-a-rank",
    ):
        yield Fault("fsdp2.py", f"fault={name}")
    yield Fault("fsdp2.py", "fault=sum-of-losses size=6")
    yield Fault("fsdp2.py", "fault=ignored dtype=float32 clip=0")
    yield Fault("fsdp2.py", "fault=block-never-synced load=0")
    for name in (
        "small-unreduced",
        "lr-on-a-rank",
        "stale-gather",
        "gather-missing",
        "sum-for-mean",
        "momentum-reset-on-a-rank",
        "muon-lr-on-a-rank",
        "owner-shifted",
    ):
        yield Fault("muon.py", f"fault={name}")
    for name in ("never-synced", "sum-for-mean", "norm-of-shard", "lr-on-a-rank"):
        for original in (0, 1):
            yield Fault("fsdp1.py", f"fault={name} original={original}")
    for name in ("shard-scaled", "norm-reduced-twice"):
        yield Fault("tensor_parallel.py", f"fault={name}")
    yield Fault("tensor_parallel.py", "fsdp=0")


FAULTS = tuple(_faults())


@dataclass(frozen=True, slots=True)
class Setting:
    """A correct setting, judged on several numbers of ranks."""

    script: str
    arguments: str
    sizes: tuple[int, ...]


def draw(count: int, *, seed: int) -> list[Setting]:
    """Draw distinct correct settings.

    Args:
        count: Number of verdicts, each on one number of ranks.
        seed: Seed of the draw.
    """
    drawn = random.Random(seed)
    left = {name: share * count // 300 + 1 for name, share in _SHARE.items()}
    found: list[Setting] = []
    for name, number in left.items():
        products = list(dict.fromkeys(itertools.product(*CHOICES[name].values())))
        for values in drawn.sample(products, min(number, len(products))):
            given = dict(zip(CHOICES[name], values, strict=True))
            # FSDP2 refuses uneven shards along any dimension but the first.
            even = name == "tensor_parallel.py" or given.get("by")
            arguments = " ".join(f"{key}={value}" for key, value in given.items())
            found.append(Setting(name, arguments, (2, 4, 8) if even else (2, 3, 4, 8)))
    drawn.shuffle(found)
    return found


def judge(script: str, arguments: str, sizes: tuple[int, ...]) -> Iterator[tuple[int, object]]:
    """Return the verdicts on a script, by number of ranks.

    Args:
        script: Name of the script.
        arguments: Its arguments.
        sizes: Numbers of ranks, each compared with one rank.
    """
    from zero_sim.against.runs import Side
    from zero_sim.against.verdict import judge, prepare
    from zero_sim.script.launch import Settings

    def side(ranks: int) -> Side:
        settings = Settings(ranks_per_node=ranks, shown=frozenset())
        return Side(
            settings=settings, name=script, is_module=False, arguments=tuple(arguments.split())
        )

    prepared = prepare(side(1), seed=0)
    for ranks in sizes:
        yield ranks, judge(prepared, side(ranks)).verdict


def main() -> int:
    """Judge, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--right", type=int, default=300, help="verdicts on right settings")
    parser.add_argument("--faults", action="store_true", help="judge the planted faults, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="0/1", help="part/parts of both")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    os.chdir(SCRIPTS)
    wrong = 0
    largest: dict[str, tuple[float, int]] = {}
    for setting in draw(options.right, seed=options.seed)[part::parts] if options.right else []:
        for ranks, verdict in judge(setting.script, setting.arguments, setting.sizes):
            multiple, count = largest.get(setting.script, (0.0, 0))
            largest[setting.script] = max(multiple, verdict.largest_multiple), count + 1
            if verdict.outcome != "equal" or verdict.largest_multiple > RIGHT_MAX:
                wrong += 1
                _say(f"{setting.script} {setting.arguments} on {ranks}: {_text(verdict)}")
    for fault in FAULTS[part::parts] if options.faults else []:
        for _, verdict in judge(fault.script, fault.arguments, (fault.ranks,)):
            first = verdict.differences[0].multiple if verdict.differences else 0.0
            found = f"{verdict.outcome}, first {first:.1e}"
            _say(f"{fault.script} {fault.arguments}: {found}")
            if verdict.outcome != fault.outcome:
                wrong += 1
                _say(f"  MISSED: {_text(verdict)}")
    for name, (multiple, count) in sorted(largest.items()):
        _say(f"{name}: {count} right verdicts, largest {multiple:.1f} times rounding")
    return 1 if wrong else 0


def _text(verdict: object) -> str:
    from zero_sim.against.text import render

    return render(verdict, None)  # pyrefly: ignore [bad-argument-type]


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
