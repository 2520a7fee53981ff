"""Observation of one rank from inside: params, gradients, state, checkpoints and rows.

The script is unchanged. torch's global module and optimizer hooks call this module, and so does a
replaced `torch.autograd.backward`. Shards are assembled after the run, so no collective is added.

[Note: params as forward used them]
A global forward hook runs before the module's own hooks. So FSDP's params are still unsharded, and
overlapped gathers have arrived. After `Optimizer.step`, a correct script may still have old params.
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

# Limit, because a checkpoint may contain references to itself.
_TREE_DEPTH = 8
WATCHED_PARAMS = 3
"""Number of params that reveal the steps of a script's own optimizer between forwards."""


class Current(threading.local):
    """Capture of the running thread; None outside observed ranks."""

    capture: RankCapture | None = None


current = Current()


class RankCapture:
    """Observer of one rank.

    Args:
        sink: Receives the observations.
        rows: Receives the rows of outermost forwards, and may replace them.
        replicas: Compares tensors of several ranks.
        steps: Optimizer steps of the earlier run that this one resumes.
        start: Values for params before their first forward, by name.
        known: Digests of the expected run's initial params, by name.
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
        """Optimizer steps so far: outermost `Optimizer.step`, or changed params without a call."""
        self.saved_at = -1
        """Optimizer steps before the last saved checkpoint; -1 if none was saved."""
        self.start = _Start(start or {})
        self.names = _Names(known)
        self.design = ByDesign(self._aside)
        self._sink = sink
        self._rows = rows
        # Nested calls count as one event: submodules, recomputed forwards, wrapped optimizers.
        self._depth = {"forward": 0, "backward": 0, "step": 0}
        self._replicas = replicas
        self._seen: set[tuple[Moment, str]] = set()
        # A script's own optimizer calls no hook of torch, so changed params reveal its steps.
        self._watched: dict[str, Tensor] | None = None
        """Values of a few params at the last forward; None if `Optimizer.step` ran since."""
        self._files: Counter[tuple[str, str, int]] = Counter()

    @property
    def is_in_backward(self) -> bool:
        """True during a backward."""
        return bool(self._depth["backward"])

    def is_computing(self) -> bool:
        """Return True during a forward or backward."""
        return bool(self._depth["forward"] or self._depth["backward"])

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Observe the calling thread as this rank."""
        current.capture = self
        try:
            yield
            # Only after success, because a failed run has no last step and no end.
            with self._aside():
                self._count_own_step()
            self._observe_end()
        finally:
            current.capture = None

    def begin_forward(self, module: Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Begin a module's forward. Return new arguments if rows are dealt."""
        self._depth["forward"] += 1
        replaced = None
        trains = torch.is_grad_enabled()
        with self._aside():
            if self._depth["forward"] == 1:
                # Name params first, then give new ones their start values, then read values.
                self.names.add(module)
                self.start.apply(self.names)
                if trains:
                    self._count_own_step()
                self._replicas.begin_outermost(module, trains=trains)
                # A teacher computes without gradients, but on training rows.
                if trains or module.training:
                    name = _class_name(module)
                    replaced = self._rows.read(self.steps, name, args, kwargs, trains=trains)
                else:
                    self._rows.evaluated(args, kwargs)
            # Only now, because `add` may have named the module.
            name = self.names.of_module(module)
            self._replicas.begin_forward(module, name, steps=self.steps, trains=trains)
        now_args, now_kwargs = replaced or (args, kwargs)
        values = (*now_args, *now_kwargs.values())
        self.design.begin_forward(name, values, step=self.steps)
        return replaced

    def _count_own_step(self) -> None:
        """Count a step of the script's own optimizer, if params changed since the last forward."""
        # A few small params suffice, because an optimizer changes all its params.
        now = {name: _local(param).clone() for name, param in self.names.smallest()}
        before, self._watched = self._watched, now
        if before is None or before.keys() != now.keys():
            return
        # The next forward observes all params again.
        if any(not torch.equal(before[name], now[name]) for name in now):
            self.steps += 1
            self._seen.clear()

    def end_forward(self, module: Module) -> None:
        """End a module's forward, and observe its params."""
        self._depth["forward"] -= 1
        prefix = self.names.of_module(module)
        with self._aside():
            self._replicas.end_forward(module, prefix, steps=self.steps)
        self.design.end_forward(module)
        if prefix is None:
            return
        # A moment of its own, because an evaluation may use averaged weights.
        moment: Moment = "forward" if torch.is_grad_enabled() else "evaluation"
        for name, tensor in _used(module):
            mesh = getattr(tensor, "device_mesh", None)
            # Ranks that share params by tensor parallelism read the same rows.
            if mesh is not None:
                self._rows.sharers.update(mesh.mesh.flatten().tolist())
            full = f"{prefix}.{name}".lstrip(".")
            # Once per step, because all micro-batches use the same params.
            if (moment, full) not in self._seen:
                self._seen.add((moment, full))
                self._observe(moment, full, tensor)

    def read_target(self, loss: str, target: Tensor) -> Tensor:
        """Record targets of a loss outside of forwards. Return other targets if rows are dealt."""
        if self._depth["forward"] or not torch.is_grad_enabled():
            return target
        with self._aside():
            return self._rows.read(self.steps, loss, (), {"target": target})[1]["target"]

    def begin_pass(self) -> None:
        """Begin a pass over a DataLoader."""
        self._rows.begin_pass()

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Observe a backward, and gradients after it."""
        self._depth["backward"] += 1
        try:
            yield
        finally:
            self._depth["backward"] -= 1
        # Activation checkpointing runs a backward within a backward.
        if not self._depth["backward"]:
            for name, param in self.names.params():
                if param.grad is not None:
                    self._observe("backward", name, param.grad, owner=param)

    def begin_step(self, optimizer: Any) -> None:
        """Begin `Optimizer.step`: observe settings and gradients."""
        self._depth["step"] += 1
        if self._depth["step"] > 1:
            return
        with self._aside():
            # Before the first forward, no module has named the params.
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
        """End `Optimizer.step`: observe state and params."""
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
                    # Some optimizers keep the step counter as a number.
                    elif isinstance(value, (int, float)) and not isinstance(value, bool):
                        self._observe_number("state", f"{name}:{key}", float(value))
                self._observe("param", name, param, owner=param)
        self.steps += 1
        # The next forward uses new params.
        self._seen.clear()
        self._watched = None

    def observe_file(self, moment: Moment, content: Any, site: tuple[str, int]) -> None:
        """Observe a checkpoint's tensors, named by their paths in it."""
        if moment == "saved":
            self.saved_at = self.steps
        if self.names.is_renumbered:
            return  # The names in it are this rank's own.
        key = (moment, *site)
        self._files[key] += 1
        # Line and count do not depend on the world size.
        label = f"checkpoint of line {site[1]}, #{self._files[key]}"
        for path, tensor in _leaves(content):
            self._observe(moment, f"{label}: {path}", tensor)

    # With `END_STEP`, because runs may end after different steps.
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
            # The elements of sparse gradients cannot be compared one by one.
            if tensor.layout is torch.strided and self._sink.wants(point):
                piece = replace(piece_of(tensor), is_buffer=is_buffer)
                place = self.names.flat.get(id(owner))
                # Gradients and state of the param's shape have its place. Scalars such as `step`
                # have none.
                if place is not None and owner is not None and tensor.shape == owner.shape:
                    piece = place.placed(piece)
                self._sink.take(self._replicas.rank, point, piece)

    @staticmethod
    @contextlib.contextmanager
    def _aside() -> Iterator[None]:
        # Not watched for data races. In stored dtypes, so that reading converts nothing.
        with torch.no_grad(), unwatched(), stored_dtypes():
            yield


class _Start:
    """Start values, by name, that replace a script's params."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.replaced: dict[str, str] = {}
        """Digests of replaced values by name, except for shards."""
        self._left = dict(values)

    def apply(self, names: _Names) -> None:
        """Give start values to params named since the last call."""
        met = list(names.params()) if self._left else []
        # Shards as well, because unsharded params are gathered from them again.
        for name, param in (*met, *names.shards()):
            value = self._left.get(name)
            piece = None if value is None else piece_of(param)
            # A param with another shape only shares the name. It keeps its own start.
            if value is None or piece is None or piece.shape != tuple(value.shape):
                continue
            if not piece.shards:
                self.replaced[name] = digest_of(piece.values)
            # Cut the rank's part out of the value, one sharded dimension after another.
            for dim, index, count in piece.shards:
                value = _chunk(value, dim=dim, index=index, count=count)
            if not torch.equal(piece.values, value):
                _local(param).copy_(value)
        for name, _ in met:
            self._left.pop(name, None)


class _Names:
    """Names of a rank's modules and params, in order of their first forwards."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self._known = known
        self.is_renumbered = False
        """True if some modules have other names on this rank than in the expected run."""
        self.roots: list[Module] = []
        """Outermost modules, in order of their first forwards."""
        self._modules: dict[int, str] = {}
        self._params: dict[int, str] = {}
        self._optimizers: list[Any] = []
        self._shards: list[tuple[str, Tensor]] = []
        self.flat: dict[int, FlatPlace] = {}
        """Places of params within flat params, by identity."""
        self.others: dict[str, Tensor] = {}
        """Optimizer params that belong to no module, by name."""

    def add(self, module: Module) -> None:
        """Name an outermost module and its parts, unless a named module contains it."""
        if id(module) in self._modules:
            return
        self.roots.append(module)
        # No prefix for the first module, so its names are those in the script's own model.
        prefix = "" if len(self.roots) == 1 else f"module {len(self.roots)}: "
        others = self._other_prefixes(module, prefix)
        self.is_renumbered |= bool(others)
        for name, each in module.named_modules():
            self._modules.setdefault(id(each), renamed(prefix + plain_name(name), others))
        for name, param in module.named_parameters():
            name = renamed(prefix + plain_name(name), others)
            known = self._params.get(id(param))
            if known is None or known in self.others:
                # A step before the first forward named it by position.
                self.others.pop(known or "", None)
                self._params[id(param)] = name
        # Views and shards are other objects than the registered params.
        self.flat.update((id(param), place) for param, place in flat_places(module))
        for owner, name, shard in shards_of_whole(module):
            full = f"{self._modules.get(id(owner), '')}.{name}".lstrip(".")
            if self._params.setdefault(id(shard), full) == full:
                self._shards.append((full, shard))

    def _other_prefixes(self, module: Module, prefix: str) -> dict[str, str]:
        if not self._known:
            return {}
        pieces = {prefix + plain_name(n): piece_of(each) for n, each in module.named_parameters()}
        # A shard has no digest of the whole param.
        whole = {name: piece for name, piece in pieces.items() if not piece.shards}
        return other_prefixes(
            {name: digest_of(piece.values) for name, piece in whole.items()}, self._known
        )

    def shards(self) -> Iterator[tuple[str, Tensor]]:
        """Return shards of params that are unsharded now."""
        present = {id(param) for _, param in self.params()}
        return (each for each in self._shards if id(each[1]) not in present)

    def add_optimizer(self, optimizer: Any) -> None:
        """Name an optimizer's params that belong to no module, by position."""
        # By identity, because optimizers may define equality, and ids are reused.
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
        """Return a module's name; None if no outermost module contains it."""
        return self._modules.get(id(module))

    def of_param(self, param: Tensor) -> str:
        """Return a param's name."""
        return self._params[id(param)]

    def params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all named params as they are now, each once."""
        met: set[int] = set()
        for root in self.roots:
            for module in root.modules():
                prefix = self._modules.get(id(module))
                if prefix is None or id(module) in met:
                    continue
                met.add(id(module))
                # Read anew, because FSDP exchanges the registered params.
                for name, param in module._parameters.items():
                    if param is not None and id(param) not in met:
                        met.add(id(param))
                        default = f"{prefix}.{name}".lstrip(".")
                        yield self._params.get(id(param), default), param
        yield from self.others.items()

    def smallest(self) -> list[tuple[str, Tensor]]:
        """Return the smallest trained params with memory. They are cheap to compare."""
        trained = [
            (name, param)
            for name, param in self.params()
            if param.requires_grad and _local(param).untyped_storage().nbytes()
        ]
        return sorted(trained, key=lambda each: each[1].numel())[:WATCHED_PARAMS]

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all named float buffers."""
        for index, root in enumerate(self.roots):
            prefix = "" if not index else f"module {index + 1}: "
            for name, buffer in root.named_buffers():
                if buffer.is_floating_point():
                    yield prefix + plain_name(name), buffer


def _class_name(module: Module) -> str:
    """Return the model's class name, without wrappers, because these differ between layouts."""
    while len(module._modules) == 1 and not module._parameters:
        (inner,) = module._modules.values()
        if inner is None:
            break
        module = inner
    # `fully_shard` creates a class derived from FSDPModule and the model's class.
    names = [each.__name__ for each in type(module).__mro__]
    return names[2] if names[1] == "FSDPModule" else names[0]


def _used(module: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the params that a module's own forward uses.

    FSDP with flat params replaces registered params by views, which are plain attributes.
    """
    for name, tensor in module._parameters.items():
        if tensor is not None:
            yield name, tensor
    for name, value in vars(module).items():
        # Views of a flat param require gradients. Other plain attributes are constants.
        if isinstance(value, Tensor) and value.requires_grad:
            yield name, value


def piece_of(tensor: Any) -> Piece:
    """Return the calling rank's piece, as a view if possible."""
    dtype = dtype_name(native(tensor))
    shape = tuple(tensor.shape)
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return Piece(values=_as_float64(tensor), shape=shape, dtype=dtype)
    mesh = tensor.device_mesh
    coordinates = mesh.get_coordinate() or [0] * mesh.ndim
    strided = [index for index, each in enumerate(placements) if _is_strided(each)]
    # A strided shard (FSDP over tensor parallelism) is cut last, out of the parts that later mesh
    # dimensions have cut.
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
    """Return a DTensor's local shard, or a plain tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


def _chunk(tensor: Tensor, *, dim: int, index: int, count: int) -> Tensor:
    """Return the shard at an index as DTensor cuts it: chunk sizes are rounded up."""
    chunks = tensor.chunk(count, dim)
    # So the last shards may be empty.
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def _as_float64(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        # [...] complex to [..., 2] float.
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(torch.float64)


def _leaves(content: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the float tensors in nested dicts and lists, with their paths."""
    if isinstance(content, Tensor):
        if content.is_floating_point() or content.is_complex():
            yield path or "the tensor", content
    elif depth < _TREE_DEPTH and isinstance(content, Mapping):
        for key, value in content.items():
            yield from _leaves(value, f"{path}.{key}".lstrip("."), depth + 1)
    elif depth < _TREE_DEPTH and isinstance(content, (list, tuple)):
        for index, value in enumerate(content):
            yield from _leaves(value, f"{path}[{index}]", depth + 1)
