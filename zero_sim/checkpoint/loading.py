"""Loading: check everything, read everything, and only then change anything."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_sim.checkpoint.all_or_none import Coordinator
from zero_sim.checkpoint.compatibility import (
    find_optimizer_problems,
    find_param_problems,
    find_span_problems,
    probe_state,
    read_new_settings,
)
from zero_sim.checkpoint.decode import decode_manifest
from zero_sim.checkpoint.folder import Folder, read_manifest
from zero_sim.checkpoint.manifest import (
    MANIFEST_NAME,
    MASTER,
    Manifest,
    ParamRecord,
    name_state,
)
from zero_sim.checkpoint.snapshot import (
    iterate_module_tensors,
    list_params,
    list_part_params,
    merge_params,
)
from zero_sim.checkpoint.tensorfile import TensorFileReader, check_file
from zero_sim.checkpoint.values import decode_value, find_dtype
from zero_sim.errors import CheckpointError
from zero_sim.layout import Span
from zero_sim.untrusted_json import build_record
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.optimizer import DistributedOptimizer

WHAT = "Checkpoint not loaded"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Loaded:
    """Everything that this rank will write, in memory of its own."""

    masters: Mapping[nn.Parameter, Tensor]  # 1D fp32 each, by leaf
    states: Mapping[nn.Parameter, dict[str, Any]]
    module: tuple[Tensor, ...]  # ND each, as iterate_module_tensors


def load(
    path: str | os.PathLike[str],
    *,
    ddp: DistributedDataParallel,
    optimizer: DistributedOptimizer,
    weights_only: bool = False,
) -> None:
    """Continue from a checkpoint; every rank of `ddp.group` must call it.

    World size, redundancy, stage, buckets, partition, alignment and order of params may all be
    others than those that it was saved with; training goes on in the same bits. Settings of param
    groups become the checkpoint's, found by the params in them, except those that choose between
    implementations (`foreach`). Gradients are zeroed.

    Args:
        path: Name of the checkpoint.
        ddp: The params; their names, shapes and dtypes must be the checkpoint's.
        optimizer: Their masters and state.
        weights_only: Whether to take masters, working params and what the module holds besides,
            and leave state, settings and loss scaler of this run as they are.

    Raises:
        CheckpointError: On all ranks, if anything is wrong with the checkpoint, or it does not fit;
            lists everything found. The run is as it was before.
    """
    coordinator = Coordinator(ddp.group, device=ddp.buffers[0].device)
    ddp.finish_param_gather()
    folder, data = _find_checkpoint(path, coordinator=coordinator)
    params = _list_all_params(ddp, coordinator=coordinator)
    decoded: list[Manifest] = []

    def check() -> list[dict[str, str]]:
        manifest = decode_manifest(data, where=str(folder / MANIFEST_NAME))
        # First what can be told from the manifest: files are as long as it says.
        _check_fit(folder, manifest, ddp, optimizer, params, weights_only=weights_only)
        if coordinator.rank == 0:
            _check_spans(folder, manifest)
        _check_files(folder, manifest, coordinator=coordinator)
        decoded.append(manifest)
        return [] if weights_only else _cast_votes(manifest, optimizer)

    ballots = coordinator.share(check, what=WHAT)
    manifest, groups = decoded[0], _match_groups(ballots)
    loaded = coordinator.attempt(
        lambda: _read_tensors(folder, manifest, ddp, optimizer, weights_only=weights_only),
        what=WHAT,
    )
    _commit_weights(loaded, ddp, optimizer)
    if not weights_only:
        _commit_optimizer(loaded, manifest, optimizer, groups=groups)


def _find_checkpoint(
    path: str | os.PathLike[str], *, coordinator: Coordinator
) -> tuple[Path, bytes]:
    """Find it on rank 0 for all: ranks must not see two checkpoints while one is replaced.

    Returns:
        The folder, and the content of its manifest.
    """

    def read() -> bytes:
        folder = Folder.at(path).find()
        return os.fsencode(folder) + b"\0" + read_manifest(folder)

    name, _, data = coordinator.share_first(read, what=WHAT).partition(b"\0")
    return Path(os.fsdecode(name)), data


def _check_files(folder: Path, manifest: Manifest, *, coordinator: Coordinator) -> None:
    """Check this rank's part of the files; the others check the rest."""
    records = manifest.files[coordinator.rank :: coordinator.size]
    problems = [check_file(folder / record.name, record=record) for record in records]
    found = [problem for problem in problems if problem is not None]
    if found:
        raise CheckpointError("\n".join(found))


def _check_spans(folder: Path, manifest: Manifest) -> None:
    """Check that the files hold everything once, which one rank can do for all."""
    with TensorFileReader(folder, manifest=manifest) as reader:
        problems = find_span_problems(manifest, reader.spans())
    if problems:
        raise CheckpointError(
            f"expected {folder} to hold every element once, got " + "; ".join(problems) + "."
        )


def _list_all_params(
    ddp: DistributedDataParallel, *, coordinator: Coordinator
) -> tuple[ParamRecord, ...]:
    """Return the trained params of all ranks, on all ranks."""
    params = list_params(ddp)
    if not ddp.holders.parts:
        return params
    merged = coordinator.gather_and_decide(
        lambda: list_part_params(ddp), lambda parts: merge_params(params, parts), what=WHAT
    )
    return build_record(tuple[ParamRecord, ...], merged, where="params")


def _check_fit(
    folder: Path,
    manifest: Manifest,
    ddp: DistributedDataParallel,
    optimizer: DistributedOptimizer,
    params: Sequence[ParamRecord],
    *,
    weights_only: bool,
) -> None:
    problems = find_param_problems(manifest, ddp, params=params)
    if not weights_only:
        problems += find_optimizer_problems(manifest, optimizer)
    if problems:
        raise CheckpointError(
            f"expected {folder} to fit this run, got {len(problems)} differences:\n  "
            + "\n  ".join(problems)
        )


def _cast_votes(manifest: Manifest, optimizer: DistributedOptimizer) -> list[dict[str, str]]:
    """Say for each param group of this rank which of the checkpoint's its params were in.

    Returns:
        For every group the checkpoint's groups by index, each with a param that was in it.
    """
    group_of = {param.name: param.group for param in manifest.params}
    names = {id(master.leaf): master.fragment.param for master in optimizer.masters}
    return [
        {str(group_of[names[id(leaf)]]): names[id(leaf)] for leaf in group["params"]}
        for group in optimizer.inner.param_groups
    ]


def _match_groups(ballots: Sequence[Sequence[Mapping[str, str]]]) -> dict[int, int]:
    """Find for each param group of this run that of the checkpoint which its params were in.

    By the params of all ranks: a rank that owns nothing of a group learns of it from the others,
    and a group that mixes two is refused in every layout alike.

    Args:
        ballots: Every rank's votes.
    """
    matched: dict[int, int] = {}
    # A rank has groups up to the last one that any of its params is in.
    for index in range(max(map(len, ballots))):
        voted: dict[str, str] = {}
        for ballot in ballots:
            voted |= ballot[index] if index < len(ballot) else {}
        if len(voted) > 1:
            first, second, *_ = voted.values()
            raise CheckpointError(
                f"{WHAT}: expected param groups as in the checkpoint, got {first!r} and "
                f"{second!r} together in group {index}: the checkpoint has different settings for "
                f"them."
            )
        if voted:
            matched[index] = int(next(iter(voted)))
    return matched


def _read_tensors(
    folder: Path,
    manifest: Manifest,
    ddp: DistributedDataParallel,
    optimizer: DistributedOptimizer,
    *,
    weights_only: bool,
) -> _Loaded:
    """Read what this rank owns into new memory."""
    records = {param.name: param for param in manifest.params}
    wanted: dict[tuple[str, str, Span], Tensor] = {}
    masters: dict[nn.Parameter, Tensor] = {}
    states: dict[nn.Parameter, dict[str, Any]] = {}
    builder = _StateBuilder(manifest, optimizer)
    for master in optimizer.masters:
        name, span = master.fragment.param, master.fragment.in_param
        masters[master.leaf] = wanted[name, MASTER, span] = torch.empty_like(master.leaf)
        if weights_only:
            continue
        states[master.leaf] = state = builder.build(records[name], leaf=master.leaf)
        for entry in records[name].state:
            if entry.dtype is not None:
                wanted[name, name_state(entry.key), span] = state[entry.key]
    module = []
    for record, tensor in iterate_module_tensors(ddp):
        fresh = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        wanted[record.name, record.kind, Span(0, tensor.numel())] = fresh
        module.append(fresh.view(tensor.shape))
    with TensorFileReader(folder, manifest=manifest) as reader:
        for (param, tensor_name, span), output in wanted.items():
            reader.read(output, param=param, tensor=tensor_name, span=span)
    return _Loaded(masters=masters, states=states, module=tuple(module))


class _StateBuilder:
    """Builds empty state as torch would have created it."""

    def __init__(self, manifest: Manifest, optimizer: DistributedOptimizer) -> None:
        self._manifest = manifest
        self._inner = optimizer.inner
        self._devices: dict[int, dict[str, torch.device]] = {}

    def build(self, record: ParamRecord, *, leaf: nn.Parameter) -> dict[str, Any]:
        """Return the state of a leaf: what is elementwise uninitialized, the rest complete."""
        state: dict[str, Any] = {}
        for entry in record.state:
            if entry.dtype is not None:
                state[entry.key] = torch.empty_like(
                    leaf, dtype=find_dtype(entry.dtype), requires_grad=False
                ).detach()
                continue
            value = decode_value(entry.value)
            if isinstance(value, Tensor):
                value = value.to(self._find_device(record, entry.key, leaf=leaf))
            state[entry.key] = value
        return state

    def _find_device(self, record: ParamRecord, key: str, *, leaf: nn.Parameter) -> torch.device:
        """Find where torch keeps a 0D state: `step` on the CPU, unless capturable, others not."""
        assert record.group is not None
        if leaf.device.type == "cpu":
            return leaf.device
        if record.group not in self._devices:
            saved = self._manifest.groups[record.group]
            settings = read_new_settings(saved, self._inner.param_groups[0])
            probe = probe_state(self._inner, settings=settings)
            created = {} if probe is None else probe[1]
            self._devices[record.group] = {
                name: value.device for name, value in created.items() if isinstance(value, Tensor)
            }
        return self._devices[record.group].get(key, torch.device("cpu"))


@torch.no_grad()
def _commit_weights(
    loaded: _Loaded, ddp: DistributedDataParallel, optimizer: DistributedOptimizer
) -> None:
    optimizer.zero_grad()
    # Module buffers first: the scales of fp8 params are among them.
    for (_, tensor), fresh in zip(iterate_module_tensors(ddp), loaded.module, strict=True):
        tensor.copy_(fresh)
    for master in optimizer.masters:
        master.leaf.copy_(loaded.masters[master.leaf])
        master.buffer.write_param_shard(master.param, master.leaf)
    ddp.gather_params()


def _commit_optimizer(
    loaded: _Loaded,
    manifest: Manifest,
    optimizer: DistributedOptimizer,
    *,
    groups: Mapping[int, int],
) -> None:
    inner = optimizer.inner
    inner.state.clear()
    for leaf, state in loaded.states.items():
        if state:
            inner.state[leaf] = state
    for index, saved_index in groups.items():
        if index >= len(inner.param_groups):
            continue  # Of params that only other ranks hold.
        saved = manifest.groups[saved_index]
        inner.param_groups[index].update(read_new_settings(saved, inner.param_groups[index]))
        optimizer.base_lrs[index] = decode_value(saved.base_lr)
    scaler = optimizer.loss_scaler
    if scaler is not None and manifest.loss_scaler is not None:
        scaler.scale = manifest.loss_scaler.scale
        scaler.good_steps = manifest.loss_scaler.good_steps
        scaler.growth_interval = manifest.loss_scaler.growth_interval
