"""Loading: everything is checked and read before anything changes."""

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
    """New values of this rank, in their own memory."""

    masters: Mapping[nn.Parameter, Tensor]  # 1D fp32 each, by leaf
    states: Mapping[nn.Parameter, dict[str, Any]]
    module: tuple[Tensor, ...]  # ND each, in the order of iterate_module_tensors


def load(
    path: str | os.PathLike[str],
    *,
    ddp: DistributedDataParallel,
    optimizer: DistributedOptimizer,
    weights_only: bool = False,
) -> None:
    """Continue from a checkpoint. Every rank of `ddp.group` must call this.

    World size, redundancy, stage, buckets, partition, alignment and param order may differ from the
    save. Training continues with the same bits. A param group gets the settings that its params had
    in the checkpoint, except for settings that select an implementation (`foreach`). Gradients are
    zeroed.

    Args:
        path: Path of the checkpoint.
        ddp: Wrapper with the params. Their names, shapes and dtypes must match the checkpoint.
        optimizer: Optimizer with their masters and state.
        weights_only: True to load only masters, working params, frozen params and buffers, and to
            keep this run's optimizer state, settings and loss scaler.

    Raises:
        CheckpointError: On all ranks, if the checkpoint is invalid or does not fit. The message
            lists all problems. The run is unchanged.
    """
    coordinator = Coordinator(ddp.group, device=ddp.buffers[0].device)
    # Wait for gathers in flight before params are overwritten.
    ddp.finish_param_gather()
    folder, data = _find_checkpoint(path, coordinator=coordinator)
    params = _list_all_params(ddp, coordinator=coordinator)
    # The check must return JSON, so it leaves the decoded manifest here.
    decoded: list[Manifest] = []

    def check() -> list[dict[str, str]]:
        manifest = decode_manifest(data, where=str(folder / MANIFEST_NAME))
        # The manifest first, because it gives the expected size of each file.
        _check_fit(folder, manifest, ddp, optimizer, params, weights_only=weights_only)
        # One rank is enough, because all ranks read the same manifest.
        if coordinator.rank == 0:
            _check_spans(folder, manifest)
        # Each rank checks a part of the files.
        _check_files(folder, manifest, coordinator=coordinator)
        decoded.append(manifest)
        return [] if weights_only else _list_group_candidates(manifest, optimizer)

    # Phase 1 checks, and phase 2 reads into new memory, each on all ranks or none. The run does not
    # change before both have succeeded on every rank.
    candidates = coordinator.share(check, what=WHAT)
    manifest, groups = decoded[0], _match_param_groups(candidates)
    loaded = coordinator.attempt(
        lambda: _read_tensors(folder, manifest, ddp, optimizer, weights_only=weights_only),
        what=WHAT,
    )
    # Phase 3 changes the run. None of its steps is expected to fail.
    _commit_weights(loaded, ddp, optimizer)
    if not weights_only:
        _commit_optimizer(loaded, manifest, optimizer, groups=groups)


def _find_checkpoint(
    path: str | os.PathLike[str], *, coordinator: Coordinator
) -> tuple[Path, bytes]:
    """Find the checkpoint on rank 0, so that all ranks read the same one during a swap.

    Returns:
        Folder, and content of its manifest.
    """

    def read() -> bytes:
        folder = Folder.at(path).find()
        # A path contains no zero byte, so the first one ends it.
        return os.fsencode(folder) + b"\0" + read_manifest(folder)

    name, _, data = coordinator.share_first(read, what=WHAT).partition(b"\0")
    return Path(os.fsdecode(name)), data


def _check_files(folder: Path, manifest: Manifest, *, coordinator: Coordinator) -> None:
    """Check this rank's share of the files. Other ranks check the rest."""
    # Every n-th file, so that only one rank reads each file.
    records = manifest.files[coordinator.rank :: coordinator.size]
    problems = [check_file(folder / record.name, record=record) for record in records]
    found = [problem for problem in problems if problem is not None]
    if found:
        raise CheckpointError("\n".join(found))


def _check_spans(folder: Path, manifest: Manifest) -> None:
    """Check that the files contain every element exactly once."""
    with TensorFileReader(folder, manifest=manifest) as reader:
        problems = find_span_problems(manifest, reader.spans())
    if problems:
        raise CheckpointError(
            f"expected {folder} to contain every element once, got " + "; ".join(problems) + "."
        )


def _list_all_params(
    ddp: DistributedDataParallel, *, coordinator: Coordinator
) -> tuple[ParamRecord, ...]:
    """Return the trained params of all ranks, on every rank."""
    # Without expert parallelism all ranks have the same params, so save a collective.
    params = list_params(ddp)
    if not ddp.holders.parts:
        return params
    # Ranks hold different experts, so they have to merge their params.
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


def _list_group_candidates(
    manifest: Manifest, optimizer: DistributedOptimizer
) -> list[dict[str, str]]:
    """Find the checkpoint's groups for the params in each param group of this rank.

    Returns:
        For each group: indices of the checkpoint's groups, each with the name of one such param.
    """
    group_of = {param.name: param.group for param in manifest.params}
    names = {id(master.leaf): master.fragment.param for master in optimizer.masters}
    return [
        {str(group_of[names[id(leaf)]]): names[id(leaf)] for leaf in group["params"]}
        for group in optimizer.inner.param_groups
    ]


def _match_param_groups(candidates: Sequence[Sequence[Mapping[str, str]]]) -> dict[int, int]:
    """Match each param group of this run with the checkpoint's group of the same params."""
    # Use all ranks' params, because a rank without params in a group still needs its settings. This
    # also refuses a group that mixes two saved groups in every layout alike.
    matched: dict[int, int] = {}
    # Ranks may have different numbers of groups: up to the last index of their own params.
    for index in range(max(map(len, candidates))):
        found: dict[str, str] = {}
        for own in candidates:
            found |= own[index] if index < len(own) else {}
        # One group cannot have the settings of two saved groups.
        if len(found) > 1:
            first, second, *_ = found.values()
            raise CheckpointError(
                f"{WHAT}: expected param groups as in the checkpoint, got {first!r} and "
                f"{second!r} in one group, {index}, but the checkpoint has different settings for "
                f"them. Put them into separate groups."
            )
        if found:
            matched[index] = int(next(iter(found)))
    return matched


def _read_tensors(
    folder: Path,
    manifest: Manifest,
    ddp: DistributedDataParallel,
    optimizer: DistributedOptimizer,
    *,
    weights_only: bool,
) -> _Loaded:
    """Read this rank's fragments and the module's tensors into new memory."""
    records = {param.name: param for param in manifest.params}
    # 1D tensors to fill, by param, tensor name and span.
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
    # Frozen params and buffers are whole on every rank.
    module = []
    for record, tensor in iterate_module_tensors(ddp):
        # 1D, because pieces are flattened. Viewed in the tensor's shape below.
        fresh = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        wanted[record.name, record.kind, Span(0, tensor.numel())] = fresh
        module.append(fresh.view(tensor.shape))
    with TensorFileReader(folder, manifest=manifest) as reader:
        for (param, tensor_name, span), output in wanted.items():
            reader.read(output, param=param, tensor=tensor_name, span=span)
    return _Loaded(masters=masters, states=states, module=tuple(module))


class _StateBuilder:
    """Builder of uninitialized state, with the dtypes and devices that torch would choose."""

    def __init__(self, manifest: Manifest, optimizer: DistributedOptimizer) -> None:
        self._manifest = manifest
        self._inner = optimizer.inner
        self._devices: dict[int, dict[str, torch.device]] = {}

    def build(self, record: ParamRecord, *, leaf: nn.Parameter) -> dict[str, Any]:
        """Return a leaf's state: elementwise tensors uninitialized, other values complete."""
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
        """Return torch's device for a 0D state: the CPU for `step`, unless capturable."""
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
        # As for `step`, the CPU if the class cannot be probed.
        return self._devices[record.group].get(key, torch.device("cpu"))


@torch.no_grad()
def _commit_weights(
    loaded: _Loaded, ddp: DistributedDataParallel, optimizer: DistributedOptimizer
) -> None:
    optimizer.zero_grad()
    # Module buffers first, because they include the scales of fp8 params, which write_param_shard
    # reads.
    for (_, tensor), fresh in zip(iterate_module_tensors(ddp), loaded.module, strict=True):
        tensor.copy_(fresh)
    for master in optimizer.masters:
        # In place, because leaves are views of the master shards.
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
    # Clear first, because a param that was never stepped has no state in the checkpoint.
    inner.state.clear()
    for leaf, state in loaded.states.items():
        if state:
            inner.state[leaf] = state
    for index, saved_index in groups.items():
        if index >= len(inner.param_groups):
            continue  # Only other ranks have params of this group.
        saved = manifest.groups[saved_index]
        inner.param_groups[index].update(read_new_settings(saved, inner.param_groups[index]))
        optimizer.base_lrs[index] = decode_value(saved.base_lr)
    scaler = optimizer.loss_scaler
    if scaler is not None and manifest.loss_scaler is not None:
        scaler.scale = manifest.loss_scaler.scale
        scaler.good_steps = manifest.loss_scaler.good_steps
        scaler.growth_interval = manifest.loss_scaler.growth_interval
