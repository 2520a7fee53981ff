"""Saving: every rank says what it owns, the ranks agree who writes what, and one gives the name.

[Note: together]
Whatever can fail on one rank runs inside `Coordinator.attempt`, so that all ranks fail with it
and none waits for another. Nothing is renamed before all have written.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any, get_args

import torch

from zero_sim.checkpoint.all_or_none import Coordinator
from zero_sim.checkpoint.folder import Folder, write_synced
from zero_sim.checkpoint.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Form,
    GroupRecord,
    Manifest,
    ParamRecord,
    WorldRecord,
    encode_manifest,
)
from zero_sim.checkpoint.snapshot import Snapshot, merge_reports, take_snapshot
from zero_sim.checkpoint.write import SavePlan, write_consolidated, write_own_files
from zero_sim.errors import CheckpointError
from zero_sim.untrusted_json import build_record
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.optimizer import DistributedOptimizer

WHAT = "Checkpoint not saved"


def save(
    path: str | os.PathLike[str],
    *,
    ddp: DistributedDataParallel,
    optimizer: DistributedOptimizer,
    form: Form = "sharded",
) -> None:
    """Save the run; every rank of `ddp.group` must call it.

    Saved are fp32 masters, all optimizer state, the settings of the param groups, the loss scaler,
    and rank 0's frozen params and persistent module buffers, the scales of fp8 params among them.
    Working params are not: they are their masters, cast. Nor are gradients: save between two steps.
    `load` takes it into any other layout.

    Args:
        path: Name of the checkpoint, a folder that all ranks reach. A checkpoint of that name is
            replaced, at the very end; until then, and if anything fails, it stays.
        ddp: The params.
        optimizer: Their masters and state.
        form: `sharded` writes one file for each rank that owns something; `consolidated` one file
            with whole tensors, which rank 0 gathers one at a time.

    Raises:
        CheckpointError: On all ranks, if anything fails on one.
    """
    plan = _agree(path, ddp=ddp, optimizer=optimizer, form=form, copy=False)
    _finish(plan, lambda: _write(plan))


def _write(plan: SavePlan) -> list[FileRecord]:
    """Write this rank's files; return their records."""
    return write_own_files(plan) if plan.form == "sharded" else write_consolidated(plan)


class SaveHandle:
    """A save under way; from `save_async`."""

    def __init__(self, plan: SavePlan) -> None:
        self._plan: SavePlan | None = plan
        self._files: list[FileRecord] = []
        self._error: Exception | None = None
        self._failure: CheckpointError | None = None
        self._thread: Thread | None = None
        if plan.form != "consolidated":
            thread = Thread(target=self._write, args=(plan,), name="checkpoint", daemon=True)
            self._thread = thread
            thread.start()

    @property
    def waited(self) -> bool:
        """Whether `wait` was called to its end."""
        return self._plan is None

    def wait(self) -> None:
        """Wait until the checkpoint is complete; every rank must call it.

        Raises:
            CheckpointError: On all ranks, if anything failed on one. A second call says the same.
        """
        if self._thread is not None:
            self._thread.join()
        plan = self._plan
        if plan is not None:
            try:
                _finish(plan, self._tell if self._thread is not None else lambda: _write(plan))
            except CheckpointError as failure:
                self._failure = failure
            self._plan = None
        if self._failure is not None:
            raise self._failure

    def _tell(self) -> list[FileRecord]:
        if self._error is not None:
            raise self._error
        return self._files

    def _write(self, plan: SavePlan) -> None:
        # In a thread of its own: no collectives here, the ranks agree in wait().
        try:
            self._files = _write(plan)
        except Exception as error:  # noqa: BLE001  (raised by wait(), on all ranks)
            self._error = error


_under_way: weakref.WeakValueDictionary[Path, SaveHandle] = weakref.WeakValueDictionary()
"""Asynchronous saves of rank 0 by path: two into one folder would mix their files."""


def save_async(
    path: str | os.PathLike[str],
    *,
    ddp: DistributedDataParallel,
    optimizer: DistributedOptimizer,
    form: Form = "sharded",
) -> SaveHandle:
    """Save as `save` does, while training goes on.

    Everything is copied to the CPU before this returns; a thread writes the copies. The checkpoint
    is there once every rank has called `wait` on what this returns, and not before.

    Args:
        path: As for `save`.
        ddp: As for `save`.
        optimizer: As for `save`.
        form: As for `save`. Of `consolidated` the copies are gathered and written in `wait`: a
            thread beside training cannot communicate.

    Raises:
        CheckpointError: On all ranks, if anything fails on one before the writing starts.
    """
    plan = _agree(path, ddp=ddp, optimizer=optimizer, form=form, copy=True)
    handle = SaveHandle(plan)
    if plan.coordinator.rank == 0:
        _under_way[plan.folder.final] = handle
    return handle


def _check_free(folder: Folder) -> None:
    running = _under_way.get(folder.final)
    if running is not None and not running.waited:
        raise CheckpointError(
            f"expected no other save into {folder.final} under way but there is one. "
            f"Try wait() on its handle first."
        )


def _agree(
    path: str | os.PathLike[str],
    *,
    ddp: DistributedDataParallel,
    optimizer: DistributedOptimizer,
    form: Form,
    copy: bool,
) -> SavePlan:
    """Take a snapshot on every rank, settle who writes what, and make the folder.

    Args:
        path: As for `save`.
        ddp: As for `save`.
        optimizer: As for `save`.
        form: As for `save`.
        copy: True if tensors are copied, so that they may change before they are written.
    """
    coordinator = Coordinator(ddp.group, device=ddp.buffers[0].device)
    ddp.finish_param_gather()

    begun: list[tuple[Folder, Snapshot]] = []

    def begin() -> dict[str, Any]:
        if form not in get_args(Form):
            raise CheckpointError(
                f"expected form to be one of {', '.join(get_args(Form))}, got {form!r}."
            )
        snapshot = take_snapshot(ddp, optimizer, copy=copy)
        begun.append((Folder.at(path), snapshot))
        return snapshot.report()

    def divide(reports: list[dict[str, Any]]) -> dict[str, Any]:
        folder, snapshot = begun[0]
        writers, params, groups = merge_reports(snapshot.params, reports)
        _check_free(folder)
        folder.begin()
        return {
            "params": params,
            "groups": groups,
            "writes": [
                [[report["pieces"][i]["param"], *report["pieces"][i]["span"]] for i in indices]
                for report, indices in zip(reports, writers, strict=True)
            ],
        }

    agreed = coordinator.gather_and_decide(begin, divide, what=WHAT)
    folder, snapshot = begun[0]
    return SavePlan(
        coordinator=coordinator,
        folder=folder,
        form=form,
        snapshot=snapshot,
        params=build_record(tuple[ParamRecord, ...], agreed["params"], where="params"),
        groups=build_record(tuple[GroupRecord, ...], agreed["groups"], where="groups"),
        writers=agreed["writes"],
    )


def _finish(plan: SavePlan, write: Callable[[], list[Any]]) -> None:
    """Write on every rank; on rank 0 the manifest, which makes it a checkpoint, and its name.

    Raises:
        CheckpointError: On all ranks, if anything fails on one; then nothing is left.
    """
    try:
        plan.coordinator.gather_and_decide(
            write, lambda written: _publish(plan, written), what=WHAT
        )
    except CheckpointError:
        if plan.coordinator.rank == 0:
            plan.folder.discard()
        raise


def _publish(plan: SavePlan, written: list[list[Any]]) -> None:
    files = [record for records in written for record in records]
    manifest = Manifest(
        form=plan.form,
        world=WorldRecord(world_size=plan.coordinator.size, torch=torch.__version__.split("+")[0]),
        params=plan.params,
        module=plan.snapshot.module,
        optimizer=plan.snapshot.optimizer,
        groups=plan.groups,
        loss_scaler=plan.snapshot.loss_scaler,
        files=build_record(tuple[FileRecord, ...], files, where="files"),
    )
    write_synced(plan.folder.saving / MANIFEST_NAME, encode_manifest(manifest))
    plan.folder.publish()
