"""The plan of a save, agreed before any rank writes: what there is, and who writes which piece."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch

from zero_sim.checkpoint.all_or_none import Coordinator
from zero_sim.checkpoint.folder import Folder
from zero_sim.checkpoint.manifest import Form, GroupRecord, ParamRecord, WorldRecord
from zero_sim.checkpoint.snapshot import Piece, Snapshot, merge_reports, take_snapshot
from zero_sim.errors import CheckpointError
from zero_sim.layout import Span
from zero_sim.untrusted_json import build_record
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.optimizer import DistributedOptimizer

WHAT = "Checkpoint not saved"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SavePlan:
    """One save, as agreed; the same on all ranks but for the snapshot."""

    coordinator: Coordinator
    folder: Folder
    form: Form
    snapshot: Snapshot
    world: WorldRecord
    params: tuple[ParamRecord, ...]
    groups: tuple[GroupRecord, ...]
    writers: Sequence[Sequence[tuple[str, int, int]]]
    """For every rank the pieces that it writes: param, first element, and that after the last."""

    @property
    def pieces(self) -> dict[tuple[str, Span], Piece]:
        """What this rank writes."""
        mine = set(self.find_pieces(self.coordinator.rank))
        held = {(piece.param, piece.span): piece for piece in self.snapshot.pieces}
        return {where: piece for where, piece in held.items() if where in mine}

    def find_pieces(self, rank: int) -> list[tuple[str, Span]]:
        """Return what a rank writes, by param and span."""
        return [(name, Span(start, stop)) for name, start, stop in self.writers[rank]]


def agree_on_save(
    path: str | os.PathLike[str],
    *,
    ddp: DistributedDataParallel,
    optimizer: DistributedOptimizer,
    form: Form,
    copy: bool,
    check_free: Callable[[Folder], None],
) -> SavePlan:
    """Take a snapshot on every rank, settle who writes what, and make the folder.

    Args:
        path: Name of the checkpoint.
        ddp: The params.
        optimizer: Their masters and state.
        form: How it will be written.
        copy: Whether to copy all tensors, so that they may change meanwhile.
        check_free: Called on rank 0; raises if somebody else is writing there.

    Raises:
        CheckpointError: On all ranks, if anything fails on one.
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
        check_free(folder)
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
        world=_describe_world(ddp),
        params=build_record(tuple[ParamRecord, ...], agreed["params"], where="params"),
        groups=build_record(tuple[GroupRecord, ...], agreed["groups"], where="groups"),
        writers=agreed["writes"],
    )


def _describe_world(ddp: DistributedDataParallel) -> WorldRecord:
    return WorldRecord(
        world_size=ddp.world_size,
        torch=torch.__version__.split("+")[0],
    )
