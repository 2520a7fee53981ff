"""Check of a machine with GPUs, `zero-sim doctor --gpu`: steps from the cheapest to the full one.

A failed step does not prevent later steps. Each failed case leaves a bundle, and a step that raises
reports the command that repeats it.
"""

from __future__ import annotations

import json
import os
import shlex
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

import zero_sim
from zero_sim.backends.nccl_settings import shown
from zero_sim.backends.transports import find_transport
from zero_sim.bundle import Ran, write_bundle
from zero_sim.errors import UsageError
from zero_sim.findings.records import CaseResult
from zero_sim.host.files import write_whole
from zero_sim.report.commands import replay_command
from zero_sim.rules.judging import EXPLAINER
from zero_sim.run.judges import Chosen, open_judge
from zero_sim.run.setup import own_setup
from zero_sim.scenario.load import parse_cases
from zero_sim.scenario.spec import OrderName, Scenario, WorldSpec

# A small model in all stages, in bf16 and fp32.
_CASES = """
schema = 1
model = { name = "mlp", hidden = 16 }
optimizer = { clip_norm = 0.5 }
system = { bucket_elems = 200 }
run = { steps = 2, stall_seconds = 120.0 }
matrix = { "model.dtype" = ["bf16", "fp32"], "system.stage" = [0, 1, 2, 3] }
"""


@dataclass(kw_only=True, slots=True)
class Step:
    """A step and its outcome."""

    name: str
    proves: str
    ok: bool = False
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)
    """Lines to print."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Failed cases with bundle and findings, and exceptions. `again` is the command to repeat."""


def visit(report: Path, *, only: Sequence[str], on_step: Callable[[Step], None]) -> Sequence[Step]:
    """Run the steps one after another. Write the report after each.

    Args:
        report: JSON file of the report. Bundles of failed cases go into a folder beside it.
        only: Names of steps to run; empty for all.
        on_step: Called with each finished step.

    Raises:
        EnvironmentProblem: There is no GPU, or no NCCL.
        UsageError: There is no step of a name.
    """
    transport = find_transport("nccl")
    transport.check()
    # This machine's GPUs limit the number of ranks.
    most = own_setup("nccl").ranks_max
    plan = list(_plan(most))
    known = [name for name, *_ in plan]
    unknown = [name for name in only if name not in known]
    # Now, because the first step may take minutes.
    if unknown:
        raise UsageError(
            f"expected --step to be one of {', '.join(known)}; got {', '.join(unknown)}."
        )
    machine = {
        "zero_sim": zero_sim.__version__,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "ranks": most,
        "settings": list(shown(os.environ)),
    }
    steps: list[Step] = []
    for name, proves, backend, cases in plan:
        if only and name not in only:
            continue
        steps.append(Step(name=name, proves=proves))
        ran = Ran(device=transport.device_type, backend=backend)
        _take(steps[-1], ran, cases, bundles=bundles_of(report))
        lines = {"machine": machine, "steps": [asdict(step) for step in steps]}
        # After each step, so that a later crash or hang loses nothing.
        write_whole(report, json.dumps(lines, indent=1).encode())
        on_step(steps[-1])
    return steps


def bundles_of(report: Path) -> Path:
    """Return the folder for bundles beside a report."""
    return report.with_name(f"{report.stem}-bundles")


def _plan(most: int) -> Iterator[tuple[str, str, Literal["sim", "nccl"], list[Scenario]]]:
    """Yield name, purpose, backend and cases of each step."""

    def cases(ranks: int, order: OrderName) -> list[Scenario]:
        found = parse_cases(_CASES, source="the cases of a visit", stem=f"{ranks} ranks")
        return [replace(case, world=WorldSpec(size=ranks, order=order)) for case in found]

    # Without NCCL, any number of ranks can share the device.
    # Without NCCL: any number of ranks shares the one device.
    both = cases(3, "linear") + cases(4, "nccl-ring")
    yield "simulated", "ranks and reference on one device agree bit for bit; no NCCL", "sim", both
    yield "one rank", "NCCL starts, is pinned, and ends", "nccl", cases(1, "nccl-ring")[:1]
    # Folding gathers contributions and adds them in a fixed order, so this only tests transfers.
    folded = cases(min(3, most), "linear")
    yield "folded", "NCCL moves bits unchanged, in every collective", "nccl", folded
    own = cases(most, "nccl-ring")
    yield "own order", "NCCL's own additions, bit for bit, in stages 0 to 3", "nccl", own


def _take(step: Step, ran: Ran, cases: Sequence[Scenario], *, bundles: Path) -> None:
    started = time.monotonic()
    try:
        chosen = Chosen(device=ran.device, explainer=EXPLAINER)
        with open_judge(chosen, backend=ran.backend) as judge:
            for case in cases:
                _note(step, case, judge(case), ran=ran, bundles=bundles)
    # Any error is reported, and the next step runs.
    except Exception as error:  # noqa: BLE001
        again = shlex.join(["zero-sim", "doctor", "--gpu", "--step", step.name])
        step.lines += [f"{type(error).__name__}: {error}", f"  again: {again}"]
        step.failures.append({"error": traceback.format_exc(), "again": again})
    step.ok, step.seconds = not step.failures, time.monotonic() - started


def _note(step: Step, case: Scenario, result: CaseResult, *, ran: Ran, bundles: Path) -> None:
    """Add the backend's measurements to a step, and record a case that did not pass."""
    notes = (note for note in result.notes if note.startswith(("probe: ", "backend.")))
    # Most cases have the same notes.
    step.lines += [note for note in notes if note not in step.lines]
    if result.verdict == "pass":
        return
    step.lines.append(f"{case.name}: {result.verdict} {result.error}".rstrip())
    step.lines += [f"  {each.check}: {each.message}" for each in result.findings]
    failure = {"case": case.name, "result": result.as_dict()}
    # Without findings, the case failed before it was judged, so a bundle would show nothing.
    if result.findings:
        bundle = write_bundle(case, result, folder=bundles, ran=ran).name
        again = replay_command(bundle, bundles=bundles, device=ran.device_named)
        failure |= {"bundle": bundle, "again": again}
        step.lines.append(f"  again: {again}")
    step.failures.append(failure)
