"""Saving: ranks report their pieces, agree on writers and write; rank 0 publishes the checkpoint.

[Note: together]
Each step that can fail on one rank runs inside a `Coordinator` method. So all ranks fail
together, and none waits in vain. Nothing is renamed before all ranks have written.
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
    """Save the run. Every rank of `ddp.group` must call this.

    The checkpoint contains fp32 masters, all optimizer state, param-group settings, the loss
    scaler, and rank 0's frozen params and persistent buffers, including the scales of fp8 params.
    Working params are not saved, because they are cast from the masters. Gradients are not saved
    either, so save between two steps. `load` accepts any other layout.

    Args:
        path: Folder of the checkpoint, which all ranks can reach. An existing checkpoint is
            replaced at the very end. Until then, and after a failure, it stays.
        ddp: Wrapper with the params.
        optimizer: Optimizer with their masters and state.
        form: `sharded` for one file per rank that owns something; `consolidated` for one file with
            whole tensors, gathered on rank 0 one at a time.

    Raises:
        CheckpointError: On all ranks, if anything fails on one rank.
    """
    plan = _agree(path, ddp=ddp, optimizer=optimizer, form=form, copy=False)
    _finish(plan, lambda: _write(plan))


def _write(plan: SavePlan) -> list[FileRecord]:
    """Write this rank's files and return their records."""
    return write_own_files(plan) if plan.form == "sharded" else write_consolidated(plan)


class SaveHandle:
    """A save in progress, returned by `save_async`."""

    def __init__(self, plan: SavePlan) -> None:
        self._plan: SavePlan | None = plan
        self._files: list[FileRecord] = []
        self._error: Exception | None = None
        self._failure: CheckpointError | None = None
        self._thread: Thread | None = None
        # A consolidated save communicates, so wait() writes it, not a thread.
        if plan.form != "consolidated":
            # A daemon thread, so that a failing run does not hang at exit.
            thread = Thread(target=self._write, args=(plan,), name="checkpoint", daemon=True)
            self._thread = thread
            thread.start()

    @property
    def waited(self) -> bool:
        """True if `wait` has completed."""
        return self._plan is None

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Every rank must call this.

        Raises:
            CheckpointError: On all ranks, if anything failed on one. Later calls raise it again.
        """
        if self._thread is not None:
            self._thread.join()
        # None after the first call, because a second call must not publish again.
        plan = self._plan
        if plan is not None:
            try:
                _finish(
                    plan, self._written_files if self._thread is not None else lambda: _write(plan)
                )
            except CheckpointError as failure:
                self._failure = failure
            self._plan = None
        if self._failure is not None:
            raise self._failure

    def _written_files(self) -> list[FileRecord]:
        if self._error is not None:
            raise self._error
        return self._files

    def _write(self, plan: SavePlan) -> None:
        # Runs in a thread, so it must not communicate. The ranks agree in wait().
        try:
            self._files = _write(plan)
        except Exception as error:  # noqa: BLE001  (raised by wait(), on all ranks)
            self._error = error


# Rank 0's asynchronous saves by path, because two saves into one folder would mix their files.
_under_way: weakref.WeakValueDictionary[Path, SaveHandle] = weakref.WeakValueDictionary()


def save_async(
    path: str | os.PathLike[str],
    *,
    ddp: DistributedDataParallel,
    optimizer: DistributedOptimizer,
    form: Form = "sharded",
) -> SaveHandle:
    """Save like `save`, while training continues.

    All tensors are copied to the CPU before this returns, and a thread writes the copies. The
    checkpoint does not exist until every rank has called `wait` on the returned handle.

    Args:
        path: See `save`.
        ddp: See `save`.
        optimizer: See `save`.
        form: See `save`. With `consolidated`, `wait` gathers and writes the copies, because a
            thread beside training cannot communicate.

    Raises:
        CheckpointError: On all ranks, if anything fails on one rank before the writing starts.
    """
    plan = _agree(path, ddp=ddp, optimizer=optimizer, form=form, copy=True)
    handle = SaveHandle(plan)
    if plan.coordinator.rank == 0:
        _under_way[plan.folder.final] = handle
    return handle


def _check_free(folder: Folder) -> None:
    running = _under_way.get(folder.final)
    # The weak dictionary drops a handle that its owner dropped without wait().
    if running is not None and not running.waited:
        raise CheckpointError(
            f"expected no save in progress into {folder.final}, got a second one. "
            f"Call wait() on the first one's handle."
        )


def _agree(
    path: str | os.PathLike[str],
    *,
    ddp: DistributedDataParallel,
    optimizer: DistributedOptimizer,
    form: Form,
    copy: bool,
) -> SavePlan:
    """Take a snapshot on every rank, assign writers, and create the folder.

    With `copy`, tensors are copied, so that they may change before they are written.
    """
    coordinator = Coordinator(ddp.group, device=ddp.buffers[0].device)
    ddp.finish_param_gather()

    # `begin` must return JSON, so it leaves its snapshot here.
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
        # On rank 0 only, which has all reports and creates the folder.
        folder, snapshot = begun[0]
        writers, params, groups = merge_reports(snapshot.params, reports)
        _check_free(folder)
        folder.begin()
        return {
            "params": params,
            "groups": groups,
            # By param and span, because indices refer to each rank's own report.
            "writes": [
                [[report["pieces"][i]["param"], *report["pieces"][i]["span"]] for i in indices]
                for report, indices in zip(reports, writers, strict=True)
            ],
        }

    # After this line all ranks have the same plan, or all have raised.
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
    """Write on every rank. Then rank 0 writes the manifest and publishes the checkpoint.

    Raises:
        CheckpointError: On all ranks, if anything fails on one. Written files are removed.
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
        # Without a local version label such as +cu128.
        world=WorldRecord(world_size=plan.coordinator.size, torch=torch.__version__.split("+")[0]),
        params=plan.params,
        module=plan.snapshot.module,
        optimizer=plan.snapshot.optimizer,
        groups=plan.groups,
        loss_scaler=plan.snapshot.loss_scaler,
        files=build_record(tuple[FileRecord, ...], files, where="files"),
    )
    # The manifest comes last, because a folder without it is not a checkpoint.
    write_synced(plan.folder.saving / MANIFEST_NAME, encode_manifest(manifest))
    plan.folder.publish()
