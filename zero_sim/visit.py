"""A first visit to a machine with GPUs: steps from the cheapest to the whole, and a report.

Every step says what it proves. One that fails, or for which there is no time left, keeps no other
from being taken; of every case that fails a bundle is kept, and whatever else goes wrong is told
with the command that takes its step again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zero_sim
from zero_sim.backends import Ending, RealRank, Teams
from zero_sim.backends.arranging import arrangement_of, in_words
from zero_sim.backends.nccl_settings import BUFFER_BYTES, shown
from zero_sim.backends.probe import Kind, by_calling, verify
from zero_sim.backends.probe_models import pieces_of
from zero_sim.backends.recorder import dump
from zero_sim.backends.transport import Transport
from zero_sim.backends.transports import find_transport
from zero_sim.bundle import Ran, write_bundle
from zero_sim.errors import UsageError, ZeroSimError
from zero_sim.findings.records import CaseResult, Finding, not_judged, unforeseen
from zero_sim.host.files import write_whole
from zero_sim.report.commands import replay_command
from zero_sim.run import real_judge
from zero_sim.run.judges import Chosen, open_judge
from zero_sim.run.real_judge import on_workers
from zero_sim.run.setup import own_setup
from zero_sim.scenario.checks import Check
from zero_sim.scenario.decode import adapter
from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)

BUDGET_SECONDS = 540.0
_ELEMS = 4099
_PATIENCE_SECONDS = 120.0


@dataclass(kw_only=True, slots=True)
class Step:
    """One step of the visit, and what came of it."""

    name: str
    proves: str
    ok: bool | None = None
    """None where it was not taken."""
    seconds: float = 0.0
    told: list[str] = field(default_factory=list)
    """What there is to say, line by line."""
    details: dict[str, Any] = field(default_factory=dict)
    """What is to be sent home besides."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Each case that did not pass, with its bundle, scenario and result; and all else that failed.
    `again` is the command that repeats it."""


class Visit:
    """The steps, taken one after another.

    Args:
        bundles: Folder for the bundles of cases that fail; made when there is one.
        seconds: After how long no further step is begun.
        only: Names of the steps to take; none for all.
        tell: Called with each step when it is over.

    Raises:
        EnvironmentProblem: There is no GPU, or no NCCL.
        UsageError: There is no such step.
    """

    def __init__(
        self,
        *,
        bundles: Path,
        seconds: float = BUDGET_SECONDS,
        only: Sequence[str] = (),
        tell: Callable[[Step], None] = lambda step: None,
    ) -> None:
        self.bundles = bundles
        self._only = only
        self._transport: Transport = find_transport("nccl")
        self._transport.check()
        self._deadline = time.monotonic() + seconds
        self._tell = tell
        self._setup = own_setup("nccl")
        self._most = self._setup.ranks_max
        self._opened: Teams | None = None
        self.steps: list[Step] = []
        known = [name for name, _, _ in self._plan()]
        unknown = [name for name in only if name not in known]
        if unknown:
            raise UsageError(
                f"expected --step to be one of {', '.join(known)}; got {', '.join(unknown)}."
            )

    def take(self) -> Sequence[Step]:
        """Take all steps for which there is time."""
        try:
            for name, proves, take in self._plan():
                if not self._only or name in self._only:
                    step = Step(name=name, proves=proves)
                    self.steps.append(step)
                    self._take(step, take)
                    self._tell(step)
        finally:
            self._close()
        return self.steps

    def _take(self, step: Step, take: Callable[[Step], None]) -> None:
        started = time.monotonic()
        if started >= self._deadline:
            step.told.append("not taken: no time left; try --seconds")
            return
        try:
            take(step)
        # Whatever it is, it is reported, and the next step is taken.
        except Exception as error:  # noqa: BLE001
            _fail(step, f"{type(error).__name__}: {error}", detail=traceback.format_exc())
            # With workers of its own, should these be the reason.
            self._close()
        step.ok = not step.failures
        step.seconds = time.monotonic() - started

    def _plan(self) -> Iterator[tuple[str, str, Callable[[Step], None]]]:
        most = self._most
        yield "machine", "what there is: versions, GPUs, how they are joined", self._machine
        yield "kernels", "the device computes; bits to hold against other machines'", self._kernels
        yield (
            "simulated",
            "ranks and reference on one device agree bit for bit; no NCCL",
            self._simulated,
        )
        yield "one rank", "NCCL starts, is pinned, and ends", self._one_rank
        yield "survival", "a rank that fails is aborted, and costs one job", self._survival
        yield (
            "order",
            f"how {most} ranks add: rings, and the sizes around a loop's edge",
            self._order,
        )
        yield "folded", "NCCL moves bits unchanged, in every collective", self._folded
        yield "own order", "NCCL's own additions, bit for bit, in stages 0 to 3", self._own_order

    def _machine(self, step: Step) -> None:
        step.details.update(
            zero_sim=zero_sim.__version__,
            python=platform.python_version(),
            platform=platform.platform(),
            torch=torch.__version__,
            cuda=str(torch.version.cuda),
            ranks=self._most,
            settings=list(shown(os.environ)),
            topology=_ask(["nvidia-smi", "topo", "-m"]),
            gpus=_ask(["nvidia-smi", "-q", "-d", "MEMORY,CLOCK,ECC"]),
        )
        step.told.append(
            f"torch {torch.__version__}, CUDA {torch.version.cuda}, {self._most} ranks at a time"
        )

    def _kernels(self, step: Step) -> None:
        hashes = dict(kernel_hashes(self._transport.device_type))
        step.details["hashes"] = hashes
        again = dict(kernel_hashes(self._transport.device_type))
        differ = [name for name in hashes if hashes[name] != again[name]]
        if differ:
            raise RuntimeError(f"expected the same bits twice, got others from {differ}")
        step.told.append(f"{len(hashes)} kernels, the same bits twice")

    def _simulated(self, step: Step) -> None:
        ran = Ran(device=self._transport.device_type)
        with open_judge(Chosen(device=ran.device)) as judge:
            self._judge_all(step, judge, [*_cases(3, "linear"), *_cases(4, "nccl-ring")], ran=ran)

    def _one_rank(self, step: Step) -> None:
        self._on_workers(step, _cases(1, "nccl-ring")[:1])

    def _survival(self, step: Step) -> None:
        size = min(2, self._most)
        for job, wanted in ((fail_first, "raised"), (add_up, "done")):
            endings = self._run(job, size=size)
            if endings[0].how != wanted:
                raise RuntimeError(f"expected {job.__name__} to be {wanted}, got {endings}")
        step.told.append(f"rank 0 of {size} failed, and the next job had new workers")

    def _order(self, step: Step) -> None:
        endings = self._run(measure, size=self._most)
        wrong = [ending for ending in endings if ending.how != "done"]
        if wrong:
            raise RuntimeError(f"expected all ranks to measure, got {wrong[0]}")
        step.details.update(endings[0].result)
        step.told.extend(endings[0].result["told"])
        for drift in endings[0].result["drifts"]:
            _fail(step, drift)

    def _folded(self, step: Step) -> None:
        self._on_workers(step, _cases(min(3, self._most), "linear"))

    def _own_order(self, step: Step) -> None:
        self._on_workers(step, _cases(self._most, "nccl-ring"))

    def _teams(self) -> Teams:
        if self._opened is None:
            preload = (*real_judge.PRELOAD, __name__)
            # One at a time: a GPU that is another team's, too, has less memory.
            self._opened = Teams(backend="nccl", preload=preload, teams_open_max=1)
        return self._opened

    def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def _run(self, job: Callable[..., Any], *, size: int) -> Sequence[Ending]:
        return self._teams().run(
            f"{__name__}:{job.__name__}",
            {"size": size},
            size=size,
            timeout_seconds=_PATIENCE_SECONDS,
        )

    def _on_workers(self, step: Step, cases: Sequence[Scenario]) -> None:
        ran = Ran(device=self._transport.device_type, backend="nccl")
        with on_workers(self._setup, teams=self._teams()) as judge:
            self._judge_all(step, judge, cases, ran=ran)
        recorded = dump()
        if recorded and step.failures:
            step.details["flight_recorder"] = recorded

    def _judge_all(
        self,
        step: Step,
        judge: Callable[[Scenario], CaseResult],
        cases: Sequence[Scenario],
        *,
        ran: Ran,
    ) -> None:
        for case in cases:
            result = _judged(judge, case)
            step.told += [note for note in result.notes if note.startswith(("probe: ", "backend."))]
            if result.verdict != "pass":
                step.failures.append(self._kept(case, result, ran=ran))
                step.told.append(f"{case.name}: {result.verdict} {result.error}".rstrip())
                step.told += [f"  {each.check}: {each.message}" for each in result.findings]
                step.told.append(f"  again: {step.failures[-1]['again']}")
        step.told = list(dict.fromkeys(step.told))
        step.told.append(f"{len(cases) - len(step.failures)} of {len(cases)} cases pass")

    def _kept(self, case: Scenario, result: CaseResult, *, ran: Ran) -> dict[str, Any]:
        """What is kept of a case that did not pass; its bundle is written."""
        if not result.findings:
            # Nothing of this is refused elsewhere.
            found = Finding(check=Check.INTERNAL_ERROR, message=result.error)
            result = replace(result, findings=(found,))
        again, bundle, unkept = "", "", ""
        try:
            bundle = write_bundle(case, result, folder=self.bundles, ran=ran).name
        except OSError as error:
            # A full disk must not end the visit.
            unkept = error.strerror or str(error)
        else:
            again = replay_command(bundle, bundles=self.bundles, device=ran.device_named)
        return {
            "case": case.name,
            "bundle": bundle,
            "unkept": unkept,
            "again": again,
            "scenario": json.loads(adapter().dump_json(case)),
            "result": result.as_dict(),
        }


def _judged(judge: Callable[[Scenario], CaseResult], case: Scenario) -> CaseResult:
    """What comes of a case, whatever is raised."""
    try:
        return judge(case)
    except ZeroSimError as error:
        return not_judged(case.name, str(error))
    except Exception as error:  # noqa: BLE001
        return unforeseen(error, id=case.name)


def _fail(step: Step, message: str, *, detail: str = "") -> None:
    """Note what failed of a step that is no case."""
    again = shlex.join(["zero-sim", "doctor", "--gpu", "--step", step.name])
    step.told += [message, f"  again: {again}"]
    step.failures.append({"case": "", "error": message, "detail": detail, "again": again})


def _cases(size: int, order: Any) -> list[Scenario]:
    """Small cases of all stages, in both precisions."""
    plain = Scenario(
        schema=1,
        name="",
        model=ModelSpec(name="mlp", dtype="bf16", hidden=16),
        world=WorldSpec(size=size, order=order),
        optimizer=OptimizerSpec(clip_norm=0.5),
        system=SystemSpec(bucket_elems=200),
        run=RunSpec(steps=2, stall_seconds=_PATIENCE_SECONDS),
    )
    cases = [
        replace(plain, name=f"stage {stage}", system=replace(plain.system, stage=stage))
        for stage in (0, 1, 2, 3)
    ]
    wide = replace(plain, name="fp32", model=replace(plain.model, dtype="fp32"))
    uneven = replace(plain, name="uneven", system=replace(plain.system, partition="uneven"))
    return [*cases, wide, uneven]


def kernel_hashes(device: str) -> Iterator[tuple[str, str]]:
    """Hashes of the bits that a fixed set of kernels gives on a device, by name."""
    generator = torch.Generator().manual_seed(20)
    x, y = (torch.randn(_ELEMS, generator=generator).to(device) for _ in range(2))
    square = x[:4096].reshape(64, 64)
    other = y[:4096].reshape(64, 64)
    made: dict[str, Callable[[], Tensor]] = {
        "add": lambda: x + y,
        "divide by a number": lambda: x / 3,
        "divide by a tensor": lambda: x / torch.full_like(x, 3.0),
        "square root": lambda: x.abs().sqrt(),
        "multiply and add": lambda: torch.addcmul(x, x, y, value=0.1),
        "to bf16": lambda: x.bfloat16(),
        "to fp16": lambda: x.half(),
        "to fp8 e4m3": lambda: x.to(torch.float8_e4m3fn),
        "to fp8 e5m2": lambda: x.to(torch.float8_e5m2),
        "bf16 to fp8 e4m3": lambda: (x * 100).bfloat16().to(torch.float8_e4m3fn),
        "from fp8 e4m3": lambda: x.to(torch.float8_e4m3fn).float(),
        "add bf16": lambda: x.bfloat16() + y.bfloat16(),
        "sum": lambda: x.sum(),
        "norm": lambda: torch.linalg.vector_norm(x),
        "product fp32": lambda: square @ other,
        "product bf16": lambda: square.bfloat16() @ other.bfloat16(),
        "gelu": lambda: torch.nn.functional.gelu(x),
        "softmax": lambda: square.softmax(1),
    }
    for name, make in made.items():
        content = make().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
        yield name, hashlib.blake2b(content, digest_size=8).hexdigest()


def add_up(payload: Mapping[str, Any], real_rank: RealRank) -> float:
    """Add the numbers of all ranks; a job."""
    with real_rank.world(payload["size"]):
        total = torch.tensor([float(real_rank.rank)], device=real_rank.transport.device)
        dist.all_reduce(total)
        return total.item()


def fail_first(payload: Mapping[str, Any], real_rank: RealRank) -> None:
    """Let rank 0 fail while the others are in a collective; a job."""
    with real_rank.world(payload["size"]):
        if real_rank.rank == 0:
            raise ValueError("rank 0 fails, as it is to")
        dist.all_reduce(torch.ones(1, device=real_rank.transport.device))


def measure(payload: Mapping[str, Any], real_rank: RealRank) -> dict[str, Any]:
    """Measure how the whole world adds, and verify it around a loop's edge; a job."""
    size = payload["size"]
    with real_rank.world(size):
        group = dist.group.WORLD
        assert group is not None
        if size < 3:
            return {"told": [f"{size} ranks add in one order only"], "drifts": []}
        device = real_rank.transport.device_type
        arrangement, observed = arrangement_of(group, device=device)
        told = [f"observed: {observed}"]
        if arrangement is None:
            return {"told": told, "drifts": ["fits no model: " + observed], "arrangement": None}
        told.append(f"arranged as {in_words(arrangement)}")
        drifts = []
        for kind, dtype, elems, sizes in _sizes_at_edges(size):
            pieces = pieces_of(
                kind,
                order="nccl-ring",
                rank_count=size,
                elems=elems,
                elem_bytes=dtype.itemsize,
                sizes=sizes,
                arrangement=arrangement,
            )
            wrong = verify(
                by_calling(kind, group=group, elems=elems, device=device, sizes=sizes),
                pieces,
                rank_count=size,
                elems=elems,
                dtype=dtype,
            )
            real_rank.alive()
            if wrong is not None:
                drifts.append(f"{kind} of {elems} elements of {dtype}: at element {wrong}")
        told.append(f"{len(drifts)} calls around the loop's edge add otherwise")
        return {"told": told, "drifts": drifts, "arrangement": arrangement.as_dict()}


def _sizes_at_edges(size: int) -> Iterator[tuple[Kind, torch.dtype, int, tuple[int, ...]]]:
    for dtype in (torch.float32, torch.bfloat16):
        loop = size * BUFFER_BYTES // 2 // dtype.itemsize
        for elems in (size, 7 * size + 1, loop, loop + 3):
            yield "all_reduce", dtype, elems, ()
        for elems in (size, loop, loop + 3 * size):
            yield "reduce_scatter", dtype, elems, ()
        sizes = tuple(5 + 2 * rank for rank in range(size))
        yield "reduce_scatter_list", dtype, sum(sizes), sizes


def _ask(command: Sequence[str]) -> str:
    """What a tool of the machine prints; why not, where it does not."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not there"
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout or done.stderr


def write_report(path: Path, visit: Visit) -> None:
    """Write what is to be sent home, as JSON; with it goes the folder of bundles that it names.

    Args:
        path: Where to.
        visit: The visit, with its steps taken.
    """
    report = {"bundles": str(visit.bundles), "steps": [asdict(step) for step in visit.steps]}
    write_whole(path, json.dumps(report, indent=1).encode())
