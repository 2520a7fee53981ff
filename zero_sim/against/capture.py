"""Observes one rank of a script from inside: params, gradients, state, checkpoints and rows.

Nothing in the script is changed. torch's global hooks of modules and optimizers, and the function
that starts a backward, lead here. Shards are put together after the run, so no collective is added.

[Note: params as forward used them]
A global forward hook runs before the hooks of the module itself. So params of FSDP are unsharded
then, and overlapped gathers have arrived. After `Optimizer.step` both may rightly be old.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from zero_sim.against.dropout import ByDesign
from zero_sim.against.flat_params import FlatPlace, flat_places, shards_of_whole
from zero_sim.against.native_dtypes import native, stored_dtypes
from zero_sim.against.numbering import other_prefixes, renamed
from zero_sim.against.points import END_STEP, Moment, Piece, Point, Sink, dtype_name
from zero_sim.replicas.of_rank import RankReplicas, plain_name
from zero_sim.replicas.rows import RowLog, digest_of
from zero_sim.sim import unwatched

_TREE_DEPTH = 8
WATCHED_PARAMS = 3


class Current(threading.local):
    """The capture of the running thread, if it is an observed rank."""

    capture: RankCapture | None = None


current = Current()


class RankCapture:
    """Observes one rank.

    Args:
        sink: Receives the observations.
        rows: Receives the rows that outermost forwards read, and may replace them.
        replicas: Compares tensors that several ranks have.
        steps: Optimizer steps of an earlier run that this one continues.
        start: Values that params get before their first forward, by name.
        known: Digests of the params of the run to compare with at their start, by name.
    """

    def __init__(
        self,
        *,
        sink: Sink,
        rows: RowLog,
        replicas: RankReplicas,
        steps: int = 0,
        start: Mapping[str, Tensor] | None = None,
        known: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.steps = steps
        """Outermost calls of `Optimizer.step` so far, or changes of params without one."""
        self.saved_at = -1
        """Optimizer steps before the last checkpoint that the rank saved; -1 if it saved none."""
        self.start = _Start(start or {})
        self.names = _Names(known)
        self.design = ByDesign(self._aside)
        self._sink = sink
        self._rows = rows
        self._depth = {"forward": 0, "backward": 0, "step": 0}
        self._replicas = replicas
        self._seen: set[tuple[Moment, str]] = set()
        self._watched: dict[str, Tensor] | None = None
        """Values of a few params at the last forward, if no `Optimizer.step` came after it."""
        self._files: Counter[tuple[str, str, int]] = Counter()

    @property
    def is_in_backward(self) -> bool:
        """True within a backward."""
        return bool(self._depth["backward"])

    def is_computing(self) -> bool:
        """True within a forward or backward."""
        return bool(self._depth["forward"] or self._depth["backward"])

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Observe what the calling thread does."""
        current.capture = self
        try:
            yield
            with self._aside():
                self._count_own_step()
            self._observe_end()
        finally:
            current.capture = None

    def begin_forward(self, module: Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Before each module's forward; new arguments if rows are dealt."""
        self._depth["forward"] += 1
        replaced = None
        trains = torch.is_grad_enabled()
        with self._aside():
            if self._depth["forward"] == 1:
                self.names.add(module)
                self.start.apply(self.names)
                if trains:
                    self._count_own_step()
                self._replicas.begin_outermost(module, trains=trains)
                # A teacher computes without gradients, and on rows of the training.
                if trains or module.training:
                    name = _class_name(module)
                    replaced = self._rows.read(self.steps, name, args, kwargs, trains=trains)
                else:
                    self._rows.evaluated(args, kwargs)
            name = self.names.of_module(module)
            self._replicas.begin_forward(module, name, steps=self.steps, trains=trains)
        now_args, now_kwargs = replaced or (args, kwargs)
        values = (*now_args, *now_kwargs.values())
        self.design.begin_forward(name, values, step=self.steps)
        return replaced

    def _count_own_step(self) -> None:
        """Count a step of an optimizer that is none of torch's: params changed since a forward."""
        now = {name: _local(param).clone() for name, param in self.names.smallest()}
        before, self._watched = self._watched, now
        if before is None or before.keys() != now.keys():
            return
        if any(not torch.equal(before[name], now[name]) for name in now):
            self.steps += 1
            self._seen.clear()

    def end_forward(self, module: Module) -> None:
        """After each module's forward."""
        self._depth["forward"] -= 1
        prefix = self.names.of_module(module)
        with self._aside():
            self._replicas.end_forward(module, prefix, steps=self.steps)
        self.design.end_forward(module)
        if prefix is None:
            return
        moment: Moment = "forward" if torch.is_grad_enabled() else "evaluation"
        for name, tensor in _used(module):
            mesh = getattr(tensor, "device_mesh", None)
            if mesh is not None:
                self._rows.sharers.update(mesh.mesh.flatten().tolist())
            full = f"{prefix}.{name}".lstrip(".")
            if (moment, full) not in self._seen:
                self._seen.add((moment, full))
                self._observe(moment, full, tensor)

    def read_target(self, loss: str, target: Tensor) -> Tensor:
        """Note the targets of a loss outside of any forward; others if rows are dealt."""
        if self._depth["forward"] or not torch.is_grad_enabled():
            return target
        with self._aside():
            return self._rows.read(self.steps, loss, (), {"target": target})[1]["target"]

    def begin_pass(self) -> None:
        """Before each pass over a DataLoader."""
        self._rows.begin_pass()

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Around each backward."""
        self._depth["backward"] += 1
        try:
            yield
        finally:
            self._depth["backward"] -= 1
        if not self._depth["backward"]:
            for name, param in self.names.params():
                if param.grad is not None:
                    self._observe("backward", name, param.grad, owner=param)

    def begin_step(self, optimizer: Any) -> None:
        """Before each `Optimizer.step`."""
        self._depth["step"] += 1
        if self._depth["step"] > 1:
            return
        with self._aside():
            self.names.add_optimizer(optimizer)
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, float):
                    self._observe_number("setting", f"{key} of group {index}", value)
            for param in group["params"]:
                if param.grad is not None:
                    name = self.names.of_param(param)
                    self._observe("gradient", name, param.grad, owner=param)

    def end_step(self, optimizer: Any) -> None:
        """After each `Optimizer.step`."""
        self._depth["step"] -= 1
        if self._depth["step"]:
            return
        self._replicas.end_step(optimizer)
        for group in optimizer.param_groups:
            for param in group["params"]:
                name = self.names.of_param(param)
                for key, value in optimizer.state.get(param, {}).items():
                    if isinstance(value, Tensor):
                        self._observe("state", f"{name}:{key}", value, owner=param)
                    elif isinstance(value, (int, float)) and not isinstance(value, bool):
                        self._observe_number("state", f"{name}:{key}", float(value))
                self._observe("param", name, param, owner=param)
        self.steps += 1
        self._seen.clear()
        self._watched = None

    def observe_file(self, moment: Moment, content: Any, site: tuple[str, int]) -> None:
        """Observe the tensors of a checkpoint by their places in it."""
        if moment == "saved":
            self.saved_at = self.steps
        if self.names.is_renumbered:
            return  # Its names are those of this rank alone.
        key = (moment, *site)
        self._files[key] += 1
        label = f"checkpoint of line {site[1]}, #{self._files[key]}"
        for path, tensor in _leaves(content):
            self._observe(moment, f"{label}: {path}", tensor)

    def _observe_end(self) -> None:
        for name, param in self.names.params():
            self._observe("end", name, param, step=END_STEP, owner=param)
        for name, buffer in self.names.buffers():
            self._observe("end", name, buffer, step=END_STEP, is_buffer=True)

    def _observe_number(self, moment: Moment, name: str, value: float) -> None:
        with self._aside():
            point = Point(self.steps, moment, name)
            if self._sink.wants(point):
                values = torch.tensor(value, dtype=torch.float64)
                self._sink.take(
                    self._replicas.rank, point, Piece(values=values, shape=(), dtype="float")
                )

    def _observe(
        self,
        moment: Moment,
        name: str,
        tensor: Tensor,
        *,
        step: int | None = None,
        owner: Tensor | None = None,
        is_buffer: bool = False,
    ) -> None:
        with self._aside():
            point = Point(self.steps if step is None else step, moment, name)
            if tensor.layout is torch.strided and self._sink.wants(point):
                piece = replace(piece_of(tensor), is_buffer=is_buffer)
                place = self.names.flat.get(id(owner))
                if place is not None and owner is not None and tensor.shape == owner.shape:
                    piece = place.placed(piece)
                self._sink.take(self._replicas.rank, point, piece)

    @staticmethod
    @contextlib.contextmanager
    def _aside() -> Iterator[None]:
        with torch.no_grad(), unwatched(), stored_dtypes():
            yield


class _Start:
    """Puts values in the place of those that params start with.

    Args:
        values: By name.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.replaced: dict[str, str] = {}
        """Digests of the values that params had before, by name. Not of shards."""
        self._left = dict(values)

    def apply(self, names: _Names) -> None:
        """Replace the values of params that have names now and had none before."""
        met = list(names.params()) if self._left else []
        # Whole params that are used now will be gathered from their shards again.
        for name, param in (*met, *names.shards()):
            value = self._left.get(name)
            piece = None if value is None else piece_of(param)
            if value is None or piece is None or piece.shape != tuple(value.shape):
                continue
            if not piece.shards:
                self.replaced[name] = digest_of(piece.values)
            for dim, index, count in piece.shards:
                value = _chunk(value, dim=dim, index=index, count=count)
            if not torch.equal(piece.values, value):
                _local(param).copy_(value)
        for name, _ in met:
            self._left.pop(name, None)


class _Names:
    """Names of a rank's modules and params, in the order in which forwards meet them."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self._known = known
        self.is_renumbered = False
        """True if the rank has other names for some modules than the run to compare with."""
        self.roots: list[Module] = []
        """Outermost modules in the order of their first forwards."""
        self._modules: dict[int, str] = {}
        self._params: dict[int, str] = {}
        self._optimizers: list[Any] = []
        self._shards: list[tuple[str, Tensor]] = []
        self.flat: dict[int, FlatPlace] = {}
        """Places of params by identity, if they are parts of flat ones."""
        self.others: dict[str, Tensor] = {}
        """Params of optimizers that no module names."""

    def add(self, module: Module) -> None:
        """Name an outermost module, unless it is part of one that has names."""
        if id(module) in self._modules:
            return
        self.roots.append(module)
        prefix = "" if len(self.roots) == 1 else f"module {len(self.roots)}: "
        others = self._other_prefixes(module, prefix)
        self.is_renumbered |= bool(others)
        for name, each in module.named_modules():
            self._modules.setdefault(id(each), renamed(prefix + plain_name(name), others))
        for name, param in module.named_parameters():
            name = renamed(prefix + plain_name(name), others)
            known = self._params.get(id(param))
            if known is None or known in self.others:
                # A step before the first forward named it by its place.
                self.others.pop(known or "", None)
                self._params[id(param)] = name
        self.flat.update((id(param), place) for param, place in flat_places(module))
        for owner, name, shard in shards_of_whole(module):
            full = f"{self._modules.get(id(owner), '')}.{name}".lstrip(".")
            if self._params.setdefault(id(shard), full) == full:
                self._shards.append((full, shard))

    def _other_prefixes(self, module: Module, prefix: str) -> dict[str, str]:
        if not self._known:
            return {}
        pieces = {prefix + plain_name(n): piece_of(each) for n, each in module.named_parameters()}
        whole = {name: piece for name, piece in pieces.items() if not piece.shards}
        return other_prefixes(
            {name: digest_of(piece.values) for name, piece in whole.items()}, self._known
        )

    def shards(self) -> Iterator[tuple[str, Tensor]]:
        """Shards of params that are whole now."""
        present = {id(param) for _, param in self.params()}
        return (each for each in self._shards if id(each[1]) not in present)

    def add_optimizer(self, optimizer: Any) -> None:
        """Name the params of an optimizer that no module names, by their places."""
        if not any(each is optimizer for each in self._optimizers):
            self._optimizers.append(optimizer)
        number = next(i for i, each in enumerate(self._optimizers) if each is optimizer)
        for index, group in enumerate(optimizer.param_groups):
            for place, param in enumerate(group["params"]):
                if id(param) not in self._params:
                    name = f"optimizer {number + 1}, group {index}, param {place}"
                    self._params[id(param)] = name
                    self.others[name] = param

    def of_module(self, module: Module) -> str | None:
        """Its name, or None for a module that no outermost module contains."""
        return self._modules.get(id(module))

    def of_param(self, param: Tensor) -> str:
        """Its name."""
        return self._params[id(param)]

    def params(self) -> Iterator[tuple[str, Tensor]]:
        """All named params as they are now, each once."""
        met: set[int] = set()
        for root in self.roots:
            for module in root.modules():
                prefix = self._modules.get(id(module))
                if prefix is None or id(module) in met:
                    continue
                met.add(id(module))
                for name, param in module._parameters.items():
                    if param is not None and id(param) not in met:
                        met.add(id(param))
                        default = f"{prefix}.{name}".lstrip(".")
                        yield self._params.get(id(param), default), param
        yield from self.others.items()

    def smallest(self) -> list[tuple[str, Tensor]]:
        """The smallest trained params that have memory."""
        trained = [
            (name, param)
            for name, param in self.params()
            if param.requires_grad and _local(param).untyped_storage().nbytes()
        ]
        return sorted(trained, key=lambda each: each[1].numel())[:WATCHED_PARAMS]

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """All named buffers of floats."""
        for index, root in enumerate(self.roots):
            prefix = "" if not index else f"module {index + 1}: "
            for name, buffer in root.named_buffers():
                if buffer.is_floating_point():
                    yield prefix + plain_name(name), buffer


def _class_name(module: Module) -> str:
    """The class of the model within its wrappers, of which two layouts may have different ones."""
    while len(module._modules) == 1 and not module._parameters:
        (inner,) = module._modules.values()
        if inner is None:
            break
        module = inner
    # `fully_shard` makes a class of its own, derived from FSDPModule and the model's class.
    names = [each.__name__ for each in type(module).__mro__]
    return names[2] if names[1] == "FSDPModule" else names[0]


def _used(module: Module) -> Iterator[tuple[str, Tensor]]:
    """The module's own params as its forward uses them.

    FSDP with flat params puts views of them in their place, which are plain attributes.
    """
    for name, tensor in module._parameters.items():
        if tensor is not None:
            yield name, tensor
    for name, value in vars(module).items():
        if isinstance(value, Tensor) and value.requires_grad:
            yield name, value


def piece_of(tensor: Any) -> Piece:
    """What the calling rank has of a tensor, as a view of its memory where possible."""
    dtype = dtype_name(native(tensor))
    shape = tuple(tensor.shape)
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return Piece(values=_as_float64(tensor), shape=shape, dtype=dtype)
    mesh = tensor.device_mesh
    coordinates = mesh.get_coordinate() or [0] * mesh.ndim
    strided = [index for index, each in enumerate(placements) if _is_strided(each)]
    # A strided shard is cut last, from what the mesh dimensions after it have cut.
    order = [*(i for i in range(len(placements)) if i not in strided), *strided]
    shards = tuple(
        (placements[index].dim, coordinates[index], mesh.shape[index])
        for index in order
        if index in strided or placements[index].is_shard()
    )
    local = tensor.to_local()
    return Piece(
        values=_as_float64(local),
        shape=shape,
        shards=shards,
        is_partial=len(strided) > 1 or any(each.is_partial() for each in placements),
        dtype=dtype_name(native(local)),
    )


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


def _local(tensor: Tensor) -> Tensor:
    """The memory of a DTensor's own shard, or of a plain tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


def _chunk(tensor: Tensor, *, dim: int, index: int, count: int) -> Tensor:
    """The shard that DTensor gives to a coordinate: chunks of the rounded-up size."""
    chunks = tensor.chunk(count, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def _as_float64(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(torch.float64)


def _leaves(content: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Float tensors of a structure of dicts and lists, with their paths."""
    if isinstance(content, Tensor):
        if content.is_floating_point() or content.is_complex():
            yield path or "the tensor", content
    elif depth < _TREE_DEPTH and isinstance(content, Mapping):
        for key, value in content.items():
            yield from _leaves(value, f"{path}.{key}".lstrip("."), depth + 1)
    elif depth < _TREE_DEPTH and isinstance(content, (list, tuple)):
        for index, value in enumerate(content):
            yield from _leaves(value, f"{path}[{index}]", depth + 1)
