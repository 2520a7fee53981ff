"""A rank's snapshot of the run: its own pieces, and data common to all ranks.

[Note: named by param]
Positions identify nothing. A buffer offset, a padded length, or the index of a param or param group
means something else in the next layout. A param name and an element of the flattened param mean the
same in all layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_sim.checkpoint.manifest import (
    MASTER,
    NO_SETTINGS,
    GroupRecord,
    ModuleRecord,
    ParamRecord,
    ScalerRecord,
    StateRecord,
    name_state,
)
from zero_sim.checkpoint.pieces import assign_writers
from zero_sim.checkpoint.values import encode_value, name_dtype
from zero_sim.errors import CheckpointError
from zero_sim.layout import Span
from zero_sim.untrusted_json import build_record
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.optimizer import DistributedOptimizer


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """Span of a param that this rank owns."""

    param: str
    span: Span
    tensors: Mapping[str, Tensor]  # 1D each, as long as the span
    state: tuple[StateRecord, ...]
    group: int
    """Index into this rank's groups."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Snapshot:
    """The run, seen from one rank."""

    params: tuple[ParamRecord, ...]
    """All trained params, without group and state, which only their owners know."""
    part_params: list[dict[str, Any]]
    """Params that only some ranks hold, such as experts; from `list_part_params`."""
    pieces: tuple[Piece, ...]
    groups: tuple[GroupRecord, ...]
    """This rank's param groups."""
    optimizer: str
    """Optimizer class."""
    loss_scaler: ScalerRecord | None
    module: tuple[ModuleRecord, ...]
    module_tensors: tuple[Tensor, ...]  # ND each, as in `module`

    def report(self) -> dict[str, Any]:
        """Return the data that rank 0 needs, as records for JSON, without tensors."""
        return {
            "part_params": self.part_params,
            "pieces": [
                {
                    "param": piece.param,
                    "span": [piece.span.start, piece.span.stop],
                    "group": piece.group,
                    "state": piece.state,
                }
                for piece in self.pieces
            ],
            "groups": self.groups,
            "optimizer": self.optimizer,
        }


def take_snapshot(
    ddp: DistributedDataParallel, optimizer: DistributedOptimizer, *, copy: bool
) -> Snapshot:
    """Collect this rank's state.

    With `copy`, all tensors are copied to the CPU. Otherwise they share the engine's memory.

    Raises:
        CheckpointError: If optimizer state cannot be split into spans, or only some ranks hold an
            untrained tensor.
    """
    # Rank 0 saves untrained tensors for all ranks, so all ranks must hold them.
    module = list(iterate_module_tensors(ddp))
    for record, tensor in module:
        if not ddp.holders.are_all(ddp.holders.kind_of(record.name, tensor)):
            raise CheckpointError(
                f"expected all untrained tensors on all ranks, because rank 0 saves them, "
                f"got {record.kind} {record.name!r}, which only some ranks hold. Train it "
                f"with a learning rate of 0."
            )
    return Snapshot(
        params=list_params(ddp),
        part_params=list_part_params(ddp),
        pieces=tuple(_build_pieces(optimizer, copy=copy)),
        groups=tuple(_encode_groups(optimizer)),
        optimizer=name_class(optimizer.inner),
        loss_scaler=read_scaler(optimizer),
        module=tuple(record for record, _ in module),
        module_tensors=tuple(_keep(tensor, copy=copy) for _, tensor in module),
    )


def list_params(ddp: DistributedDataParallel) -> tuple[ParamRecord, ...]:
    """Return this rank's trained params, without group and state."""
    return tuple(
        ParamRecord(
            name=name,
            shape=tuple(param.shape),
            dtype=name_dtype(param.dtype),
            group=None,
            state=(),
        )
        for name, param in ddp.params.items()
    )


def list_part_params(ddp: DistributedDataParallel) -> list[dict[str, Any]]:
    """Return params that only some ranks hold, for JSON, with the first rank of their group."""
    holders = ddp.holders
    return [
        {"param": param, "holder": dist.get_global_rank(holders.parts[kind].group, 0)}
        for param in (list_params(ddp) if holders.parts else ())
        if (kind := holders.kinds[param.name]) in holders.parts
    ]


def merge_params(
    first: Sequence[ParamRecord], parts: Sequence[Sequence[dict[str, Any]]]
) -> tuple[ParamRecord, ...]:
    """Return rank 0's params, then those in the other ranks' `list_part_params`, in rank order.

    Raises:
        CheckpointError: If two groups of ranks have params with the same name.
    """
    merged = {param.name: param for param in first}
    # A group's first rank identifies it.
    holders: dict[str, int] = {}
    for record in (record for records in parts for record in records):
        param = build_record(ParamRecord, record["param"], where="param")
        holder = record["holder"]
        # If rank 0 holds it too, it keeps its place in registration order.
        merged.setdefault(param.name, param)
        if holders.setdefault(param.name, holder) != holder:
            raise CheckpointError(
                f"expected params on some ranks only to have unique names, got two "
                f"called {param.name!r}, in the groups of ranks {holders[param.name]} and {holder}."
                f" Include the expert's global index in the name."
            )
    return tuple(merged.values())


def name_class(inner: Optimizer) -> str:
    """Return the class name that identifies an optimizer in checkpoints."""
    return type(inner).__qualname__


def read_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a param group's settings, without its params and index."""
    return {key: value for key, value in group.items() if key not in NO_SETTINGS}


def read_scaler(optimizer: DistributedOptimizer) -> ScalerRecord | None:
    """Return the loss scaler's state; None without a scaler."""
    scaler = optimizer.loss_scaler
    if scaler is None:
        return None
    return ScalerRecord(
        scale=float(scaler.scale),
        good_steps=int(scaler.good_steps),
        growth_interval=int(scaler.growth_interval),
    )


def iterate_module_tensors(
    ddp: DistributedDataParallel,
) -> Iterator[tuple[ModuleRecord, Tensor]]:
    """Yield the module's untrained tensors: frozen params and persistent buffers.

    Other buffers are skipped, as in `state_dict`.
    """
    # Compare ids, because hashing a param is slower than everything else here.
    trained = set(map(id, ddp.params.values()))
    for name, param in ddp.module.named_parameters():
        if id(param) not in trained:
            yield _record(name, "frozen", param), param.detach()
    # Each name with the prefix of the declaring module.
    skipped = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in ddp.module.named_modules()
        for name in module._non_persistent_buffers_set
    }
    for name, tensor in ddp.module.named_buffers():
        if name not in skipped:
            yield _record(name, "buffer", tensor), tensor


def merge_reports(
    params: Sequence[ParamRecord], reports: Sequence[dict[str, Any]]
) -> tuple[list[list[int]], list[ParamRecord], list[dict[str, Any]]]:
    """Combine rank 0's params with the reports of all ranks.

    Returns:
        Indices of the pieces that each rank writes; params with groups and state; and groups.

    Raises:
        CheckpointError: If ranks contradict each other, or an element has no owner.
    """
    # JSON has no spans, so a report contains [start, stop].
    owned = [
        [(piece["param"], Span(*piece["span"])) for piece in report["pieces"]] for report in reports
    ]
    params = merge_params(params, [report["part_params"] for report in reports])
    # Every element needs exactly one writer, so count elements from the shapes.
    numels = {param.name: _count(param.shape) for param in params}
    writers = assign_writers(numels, owned)
    classes = {report["optimizer"] for report in reports}
    if len(classes) > 1:
        raise CheckpointError(f"expected one class of optimizer, got {sorted(classes)}.")
    # Compare groups by settings, not by index, so that equal groups are stored once.
    groups: list[dict[str, Any]] = []
    known: dict[str, tuple[int, list[dict[str, Any]], int]] = {}
    for rank, report in enumerate(reports):
        for piece in report["pieces"]:
            settings = report["groups"][piece["group"]]
            if settings not in groups:
                groups.append(settings)
            mine = (groups.index(settings), piece["state"])
            first = known.setdefault(piece["param"], (*mine, rank))
            # Every owner of a fragment reports the param's group and state. They must agree.
            if first[:2] != mine:
                raise CheckpointError(
                    f"expected one param group and one step count for each param, got "
                    f"{groups[first[0]]}, {first[1]} and {settings}, {piece['state']} on ranks "
                    f"{first[2]} and {rank}, which own parts of {piece['param']!r}."
                )
    merged = []
    for param in params:
        # A param without elements has no piece, so neither group nor state.
        group, state, _ = known.get(param.name, (None, [], 0))
        entries = build_record(tuple[StateRecord, ...], state, where=f"state of {param.name}")
        merged.append(
            ParamRecord(
                name=param.name, shape=param.shape, dtype=param.dtype, group=group, state=entries
            )
        )
    return writers, merged, groups


def _build_pieces(optimizer: DistributedOptimizer, *, copy: bool) -> Iterator[Piece]:
    inner = optimizer.inner
    # By id, because tensors compare elementwise.
    group_of = {
        id(param): index
        for index, group in enumerate(inner.param_groups)
        for param in group["params"]
    }
    for master in optimizer.masters:
        leaf = master.leaf
        name, span = master.fragment.param, master.fragment.in_param
        # 1D each, as long as the fragment.
        tensors = {MASTER: _keep(leaf.detach(), copy=copy)}
        state: list[StateRecord] = []
        for key, value in inner.state.get(leaf, {}).items():
            entry = _describe_state(key, value, leaf=leaf, where=f"of {name!r}{span}")
            if entry.dtype is not None:
                tensors[name_state(key)] = _keep(value.detach(), copy=copy)
            state.append(entry)
        yield Piece(
            param=name, span=span, tensors=tensors, state=tuple(state), group=group_of[id(leaf)]
        )


def _encode_groups(optimizer: DistributedOptimizer) -> Iterator[GroupRecord]:
    """Yield each group's settings, and its learning rate before any factor."""
    groups = optimizer.inner.param_groups
    for group, base_lr in zip(groups, optimizer.base_lrs, strict=True):
        settings = read_settings(group)
        yield GroupRecord(
            settings={name: encode_value(value) for name, value in settings.items()},
            base_lr=encode_value(base_lr),
        )


def _describe_state(key: object, value: object, *, leaf: nn.Parameter, where: str) -> StateRecord:
    if not isinstance(key, str):
        raise CheckpointError(f"expected state with string keys, got {key!r} {where}.")
    # A tensor with dimensions is elementwise, so it is split into spans like its master.
    if isinstance(value, Tensor) and value.dim():
        if value.shape != leaf.shape:
            raise CheckpointError(
                f"expected state of one element or of shape {tuple(leaf.shape)}, this rank's "
                f"fragment, got {key!r} of shape {tuple(value.shape)} {where}."
            )
        return StateRecord(key=key, dtype=name_dtype(value.dtype), value=None)
    try:
        return StateRecord(key=key, dtype=None, value=encode_value(value))
    except CheckpointError as error:
        raise CheckpointError(f"State {key!r} {where} cannot be saved. {error}") from error


def _record(name: str, kind: Literal["frozen", "buffer"], tensor: Tensor) -> ModuleRecord:
    return ModuleRecord(
        name=name, kind=kind, shape=tuple(tensor.shape), dtype=name_dtype(tensor.dtype)
    )


def _keep(tensor: Tensor, *, copy: bool) -> Tensor:
    # copy=True even on the CPU, because training goes on writing to the original.
    return tensor.detach().to("cpu", copy=True) if copy else tensor


def _count(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
