"""Plan of a save, and its files, written by each rank or by rank 0 alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from zero_sim.checkpoint.all_or_none import Coordinator
from zero_sim.checkpoint.entries import (
    CONSOLIDATED_NAME,
    MODULE_NAME,
    Entry,
    build_part,
    build_whole,
    sort_entries,
)
from zero_sim.checkpoint.folder import Folder
from zero_sim.checkpoint.manifest import (
    MASTER,
    FileRecord,
    Form,
    GroupRecord,
    ParamRecord,
    name_state,
)
from zero_sim.checkpoint.snapshot import Piece, Snapshot
from zero_sim.checkpoint.tensorfile import TensorFileWriter
from zero_sim.checkpoint.values import find_dtype, name_dtype
from zero_sim.layout import Span


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SavePlan:
    """Agreed plan of a save, equal on all ranks except for the snapshot."""

    coordinator: Coordinator
    folder: Folder
    form: Form
    snapshot: Snapshot
    params: tuple[ParamRecord, ...]
    groups: tuple[GroupRecord, ...]
    writers: Sequence[Sequence[tuple[str, int, int]]]
    """Pieces that each rank writes: param, first element, and element after the last."""

    @property
    def pieces(self) -> dict[tuple[str, Span], Piece]:
        """Pieces that this rank writes."""
        # With replicas, a rank owns more pieces than it writes.
        mine = set(self.find_pieces(self.coordinator.rank))
        held = {(piece.param, piece.span): piece for piece in self.snapshot.pieces}
        return {where: piece for where, piece in held.items() if where in mine}

    def find_pieces(self, rank: int) -> list[tuple[str, Span]]:
        """Return the pieces that a rank writes, by param and span."""
        return [(name, Span(start, stop)) for name, start, stop in self.writers[rank]]


def write_own_files(plan: SavePlan) -> list[FileRecord]:
    """Write the pieces assigned to this rank, and on rank 0 also untrained tensors.

    It must not communicate, because it may run in a thread.
    """
    tensors: dict[Entry, Tensor] = {}
    for piece in plan.pieces.values():
        for name, tensor in piece.tensors.items():
            dtype = name_dtype(tensor.dtype)
            entry = build_part(param=piece.param, tensor=name, span=piece.span, dtype=dtype)
            tensors[entry] = tensor
    files = []
    if tensors:
        # Leading zeros, so that file listings are in rank order.
        name = f"rank-{plan.coordinator.rank:05d}-of-{plan.coordinator.size:05d}.safetensors"
        files.append(_write_all(plan.folder.saving / name, tensors))
    return files + write_module_file(plan)


def write_module_file(plan: SavePlan) -> list[FileRecord]:
    """Write frozen params and buffers, if there are any and this is rank 0."""
    tensors = _list_module(plan)
    if plan.coordinator.rank != 0 or not tensors:
        return []
    return [_write_all(plan.folder.saving / MODULE_NAME, tensors)]


def write_consolidated(plan: SavePlan) -> list[FileRecord]:
    """Gather on rank 0, which writes each tensor before it receives the next.

    Raises:
        Exception: On rank 0, if it cannot write. It receives everything before this.
    """
    if plan.coordinator.rank != 0:
        _send_own(plan)
        return []
    module = _list_module(plan)
    # Untrained tensors are not gathered, because rank 0 has them.
    entries = [*_list_whole(plan.params), *module]
    collected = _collect_whole(plan, entries, module)
    tensors = (tensor for _, tensor in collected)
    try:
        return [_write_file(plan.folder.saving / CONSOLIDATED_NAME, entries, tensors)]
    except Exception:
        # Receive the rest even if the disk is full, because other ranks wait in send.
        for _ in collected:
            pass
        raise


def _send_own(plan: SavePlan) -> None:
    """Send this rank's pieces in the order of rank 0's receives."""
    pieces, own = plan.pieces, plan.find_pieces(plan.coordinator.rank)
    # Copies are on the CPU, but the group may need tensors on its device.
    parts = [
        pieces[where].tensors[entry.piece.tensor].to(plan.coordinator.device)
        for entry in sort_entries(_list_whole(plan.params))
        for where in own
        if where[0] == entry.piece.param
    ]
    group = plan.coordinator.group
    # Issue all sends before the first wait. Rank 0 receives them one at a time.
    for work in [dist.isend(part, group=group, group_dst=0) for part in parts]:
        assert work is not None
        work.wait()


def _collect_whole(
    plan: SavePlan, entries: Sequence[Entry], module: Mapping[Entry, Tensor]
) -> Iterator[tuple[Entry, Tensor]]:
    """Yield whole tensors in file order. Only one gathered tensor is in memory at a time."""
    # Writers of each param by rank.
    owners: dict[str, list[tuple[int, Span]]] = {}
    for rank in range(plan.coordinator.size):
        for name, span in plan.find_pieces(rank):
            owners.setdefault(name, []).append((rank, span))
    own = plan.pieces
    for entry in sort_entries(entries):
        if entry in module:
            yield entry, module[entry]
            continue
        record = entry.piece
        # 1D, all of the param's elements, on the group's device.
        whole = torch.empty(
            record.stop, dtype=find_dtype(entry.dtype), device=plan.coordinator.device
        )
        # Per tensor in rank order, which is the order of sends in _send_own.
        for rank, span in owners.get(record.param, []):
            part = whole[span.start : span.stop]
            if rank == plan.coordinator.rank:
                part.copy_(own[record.param, span].tensors[record.tensor])
            else:
                dist.recv(part, group=plan.coordinator.group, group_src=rank)
        yield entry, whole


def _list_whole(params: Sequence[ParamRecord]) -> list[Entry]:
    entries = []
    for param in params:
        dtypes = {MASTER: "float32"}
        dtypes |= {name_state(s.key): s.dtype for s in param.state if s.dtype is not None}
        for name, dtype in dtypes.items():
            entries.append(
                build_whole(param=param.name, tensor=name, shape=param.shape, dtype=dtype)
            )
    return entries


def _list_module(plan: SavePlan) -> dict[Entry, Tensor]:
    tensors: dict[Entry, Tensor] = {}
    pairs = zip(plan.snapshot.module, plan.snapshot.module_tensors, strict=True)
    for module, tensor in pairs:
        entry = build_whole(
            param=module.name, tensor=module.kind, shape=module.shape, dtype=module.dtype
        )
        tensors[entry] = tensor
    return tensors


def _write_file(path: Path, entries: Sequence[Entry], tensors: Iterable[Tensor]) -> FileRecord:
    """Write a file from tensors in the order of `sort_entries`."""
    writer = TensorFileWriter(path, entries=entries)
    try:
        for tensor in tensors:
            writer.write(tensor)
        return writer.finish()
    finally:
        writer.close()


def _write_all(path: Path, tensors: Mapping[Entry, Tensor]) -> FileRecord:
    # In the writer's order, because it sorts in the same way.
    entries = sort_entries(tensors)
    return _write_file(path, entries, map(tensors.__getitem__, entries))
