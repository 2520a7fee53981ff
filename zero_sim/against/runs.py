"""One observed run of a script, in a copy of its working folder."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from zero_sim.against import native_dtypes
from zero_sim.against.capture import RankCapture
from zero_sim.against.dropout import Mask
from zero_sim.against.gathers import GatherLog
from zero_sim.against.hidden import IntegerSums, Reductions
from zero_sim.against.hooks import hooks_installed
from zero_sim.against.points import Sink
from zero_sim.against.wide_operations import NativeNoise, WideOperations
from zero_sim.errors import UsageError
from zero_sim.host.working_folder import files_of, in_copy_of
from zero_sim.replicas.check import ReplicaCheck
from zero_sim.replicas.of_rank import RankReplicas, world_size_of_run
from zero_sim.replicas.rows import Dealer, RowLog
from zero_sim.script.launch import Launcher, Settings
from zero_sim.script.program import read_script
from zero_sim.script.record import ScriptRun
from zero_sim.sim.call import Call
from zero_sim.sim.log import CollectiveRecord

COPY_LIMIT_BYTES = 2 << 30
# Initial value of memory before the script fills it.
FILL = 1 / 8
COLLECTED_ELEMS = 1 << 20
"""Param elements on all ranks above which a run's model is freed at once."""
# Rank of the script's main part in noise seeds. No real rank is as large.
_STARTER = 999


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """Configuration of a script: settings and arguments."""

    settings: Settings
    name: str
    is_module: bool
    arguments: tuple[str, ...]
    earlier_arguments: tuple[str, ...] | None = None
    """Arguments of an earlier run in the same folder, which stops early; None for no such run."""
    spare_gpus: int = 0
    """GPUs to report to a script that does nothing with one per rank; 0 for no such attempt."""
    label: str = ""
    """Name of the side; empty to use its number of ranks."""
    allowed_drift: tuple[str, ...] = ()
    """Name patterns of tensors that may differ among ranks."""
    started: int = 0
    """Number of ranks, if the script starts them itself; 0 if torchrun starts them."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.started or self.settings.world_size

    def as_tried(self, other: Side) -> Side:
        """Return this side with the settings under which the other side ran."""
        tried = other.settings
        settings = replace(
            self.settings,
            starter=tried.starter,
            cuda_is_cpu=tried.cuda_is_cpu,
            kernels_are_stubs=tried.kernels_are_stubs,
        )
        return replace(self, settings=settings)

    @property
    def text(self) -> str:
        """Name of the side, such as `4 ranks`."""
        if self.label:
            return self.label
        count = self.world_size
        return f"{count} rank{'s' if count != 1 else ''}"


@dataclass(kw_only=True, slots=True)
class Observed:
    """Facts about one run. Its tensors are in the sink."""

    script: ScriptRun
    side: Side
    """Side with the settings that the run needed, for example CUDA on the CPU."""
    rows: list[RowLog] = field(default_factory=list)
    operations: tuple[tuple[str, int], ...] = ()
    """Digest and number of operations, by rank."""
    steps_of_ranks: tuple[int, ...] = ()
    """Calls of `Optimizer.step`, by rank."""
    saved_at: int = -1
    """Optimizer steps before the last saved checkpoint; -1 if none was saved."""
    started: tuple[Mapping[str, str], ...] = ()
    """Digests of params replaced at the start, by rank."""
    gathers: GatherLog = field(default_factory=GatherLog)
    replicas: ReplicaCheck
    integers: IntegerSums = field(default_factory=IntegerSums)
    reductions: Reductions = field(default_factory=Reductions)
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Reason why a module's result depends on the number of ranks, by module."""
    masks: Set[Mask] = frozenset()
    """Dropout masks that ranks drew."""

    @property
    def step_count(self) -> int:
        """Most optimizer steps on any rank."""
        return max(self.steps_of_ranks, default=0)

    @property
    def resumed_at(self) -> int:
        """Optimizer steps that a resumed run does not repeat."""
        return self.saved_at if self.saved_at >= 0 else self.step_count


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """Options for observing a run."""

    sink: Sink
    is_native: bool = False
    """True to compute in native dtypes."""
    noise_seed: int | None = None
    """Seed of rounding noise; None for no noise."""
    fill: float = FILL
    dealt: tuple[RowLog, ...] | None = None
    """Rows to deal: one log for all ranks, or one per rank. None if ranks read their own rows."""
    splits: bool = False
    """True to split each dealt batch among ranks."""
    keeps_rows: bool = False
    start: Mapping[str, Tensor] | None = None
    """Values for params before their first forward, by name; None to keep the script's."""
    known: Mapping[str, str] = field(default_factory=dict)
    """Digests of the expected run's initial params, by name."""
    called: Callable[[CollectiveRecord, Call], None] | None = None
    """Receives each collective."""


class _Observer:
    """Observer inside the ranks of one run.

    Args:
        way: Options of the observation.
        steps: Optimizer steps of the earlier run that this one resumes.
        replicas: Comparison of tensors between ranks.
    """

    needs_all_ranks = True

    def __init__(self, way: Way, *, steps: int, replicas: ReplicaCheck) -> None:
        self.captures: dict[int, RankCapture] = {}
        self.rows: dict[int, RowLog] = {}
        self.operations: dict[int, WideOperations] = {}
        self.gathers = GatherLog()
        self.integers = IntegerSums()
        self.reductions = Reductions()
        self._way = way
        self._steps = steps
        self._replicas = replicas

    @contextlib.contextmanager
    def in_rank(self, rank: int) -> Iterator[None]:
        """Observe one rank."""
        way = self._way
        earlier = self.captures.get(rank)
        if rank not in self.rows:
            self.rows[rank] = self._row_log(rank)
        capture = self.captures[rank] = RankCapture(
            sink=way.sink,
            # One log per rank, even if the script starts several worlds.
            rows=self.rows[rank],
            # Steps count on in a later world of the same script.
            steps=self._steps if earlier is None else earlier.steps,
            start=way.start,
            known=way.known,
            replicas=RankReplicas(rank, self._replicas, world_size=world_size_of_run()),
        )
        with self._mode(rank), capture.observing():
            yield

    def in_starter(self) -> AbstractContextManager[object]:
        """Compute like a rank, without observation."""
        return self._mode(_STARTER)

    def _mode(self, rank: int) -> AbstractContextManager[object]:
        way = self._way
        # A seed per rank, so that ranks do not round alike.
        seed = None if way.noise_seed is None else way.noise_seed * 1000 + rank
        if way.is_native:
            return contextlib.nullcontext() if seed is None else NativeNoise(seed)
        if rank not in self.operations:
            self.operations[rank] = WideOperations(
                noise_seed=seed,
                fill=way.fill,
                counts=lambda: rank in self.captures and self.captures[rank].is_computing(),
                # Not with noise, because it leaves few values whole.
                added=functools.partial(self.integers.added, rank) if seed is None else None,
            )
        return self.operations[rank]

    def _row_log(self, rank: int) -> RowLog:
        way = self._way
        if way.dealt is None:
            return RowLog(rank=rank, keeps_values=way.keeps_rows)
        world_size = world_size_of_run()
        # One log per rank, or one log dealt to all ranks.
        if len(way.dealt) == world_size:
            dealer = Dealer(way.dealt[rank], rank=0, world_size=1, splits=way.splits)
        else:
            dealer = Dealer(way.dealt[0], rank=rank, world_size=world_size, splits=way.splits)
        return RowLog(rank=rank, deal=dealer.deal)

    def called(self, record: CollectiveRecord, call: Call) -> None:
        """Check a call for places and precision faults, and pass it on."""
        capture = self.captures[record.rank]
        # Comparisons need the stored float64 values.
        with torch.no_grad(), native_dtypes.stored_dtypes():
            self.gathers.called(record, call, step=capture.steps, params=capture.names.others)
            if not self._way.is_native and self._way.noise_seed is None:
                self.integers.called(record, call)
                self.reductions.called(record, call, capture)
        if self._way.called is not None:
            self._way.called(record, call)


def observe(side: Side, way: Way, *, seed: int) -> Observed:
    """Run a script once in a copy of the working folder.

    The seed is for the schedule, and for random numbers without a seed in the script.

    Raises:
        UsageError: The script does not exist, or the folder is too large to copy.
    """
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(_in_copy(side))
        if not way.is_native:
            stack.enter_context(native_dtypes.installed())
        stack.enter_context(hooks_installed())
        stack.enter_context(mock.patch.object(torch, "compile", _uncompiled))
        if side.earlier_arguments is None:
            return _observe(side, way, side.arguments, path=name, seed=seed, before=None)
        before = _observe(side, way, side.earlier_arguments, path=name, seed=seed, before=None)
        if before.script.failure is not None:
            return before
        # The resumed run loads its own params.
        way = replace(way, start=None)
        return _observe(before.side, way, side.arguments, path=name, seed=seed, before=before)


def _observe(
    side: Side, way: Way, arguments: Sequence[str], *, path: str, seed: int, before: Observed | None
) -> Observed:
    steps = 0 if before is None else before.resumed_at
    replicas = ReplicaCheck(allowed=side.allowed_drift)
    guest = _Observer(way, steps=steps, replicas=replicas)
    script = read_script(path, is_module=side.is_module, arguments=arguments)
    with Launcher(replace(script, name=side.name), side.settings, guest=guest) as launcher:
        # Repeat below, not in the launcher, because the sink must forget the failed attempt.
        run = launcher.run(seed=seed, quiet=True, repeats=False)
        other = None if before is not None else launcher.other_settings(run)
    if other is not None:
        # Discard the failed attempt's observations.
        way.sink.forget()
        other_side = replace(side, settings=other)
        return _observe(other_side, way, arguments, path=path, seed=seed, before=None)
    ranks = sorted(guest.captures)
    if side.settings.starter:
        side = replace(side, started=len(ranks))
    captures = [guest.captures[rank] for rank in ranks]
    rows = [guest.rows[rank] for rank in ranks]
    observed = Observed(
        script=run,
        side=side,
        # The resumed run reads the rows after the checkpoint again.
        rows=rows if before is None else [*(log.until(steps) for log in before.rows), *rows],
        operations=tuple(
            (guest.operations[rank].digest, guest.operations[rank].operation_count)
            for rank in ranks
            if rank in guest.operations
        ),
        steps_of_ranks=tuple(each.steps for each in captures),
        saved_at=max((each.saved_at for each in captures), default=-1),
        gathers=guest.gathers,
        replicas=replicas,
        integers=guest.integers,
        reductions=guest.reductions,
        started=tuple(each.start.replaced for each in captures),
        reasons={
            name: reason for each in captures for name, reason in each.design.refusals.items()
        },
        masks={mask for each in captures for mask in each.design.masks},
    )
    elems = sum(param.numel() for each in captures for _, param in each.names.params())
    # Break the reference from the run's log to the captures and on to the script's model.
    captures.clear()
    guest.captures.clear()
    if elems > COLLECTED_ELEMS:
        gc.collect()
    return observed


def _uncompiled(model: object = None, **options: object) -> object:
    """Replace `torch.compile`, because compiled kernels have no float64 version."""
    return model if model is not None else lambda function: function


@contextlib.contextmanager
def _in_copy(side: Side) -> Iterator[str]:
    """Change to a copy of the working folder, and yield the script's path in it."""
    # First, so that errors contain the name as the user gave it.
    read_script(side.name, is_module=side.is_module, arguments=side.arguments)
    # Add up sizes first, because copying a large folder would fill the disk before it fails.
    folder, total = Path.cwd(), 0
    for path in files_of(folder):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
        if total > COPY_LIMIT_BYTES:
            raise UsageError(
                f"expected a working folder of at most {COPY_LIMIT_BYTES >> 30} GiB, because each "
                f"run gets its own copy, got more in {str(folder)!r}. Run from a smaller "
                "folder, and use the script's path."
            )
    script = Path(os.path.abspath(side.name))
    with in_copy_of(folder) as copy:
        if side.is_module:
            yield side.name
        elif script.is_relative_to(folder):
            yield str(copy / script.relative_to(folder))
        else:
            # A script elsewhere runs in place, with the copy as its working folder.
            yield str(script)
