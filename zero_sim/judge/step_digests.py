"""Digests of all that one step owes: what judges need of a reference that another process has.

Where each rank is judged in a process of its own, one of them computes the reference's steps and
tells the others these. Who holds the same bits has the same digests; whoever has not computes the
reference anew and compares element by element, so that digests never decide what a finding says.

[Note: equal digests]
Elements that are equal under [Note: the rule for equality] have one digest, but for NaNs: where one
is owed, ranks compare with a reference of their own.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from zero_sim.judge.guarantee import Guarantee, count_guarantees
from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.judge.told import told_as
from zero_sim.reference import BoundedStep, ReferenceStep
from zero_sim.scenario.spec import Scenario

Span = tuple[str, int, int]
"""A param, and half-open elements of it."""

_DIGEST_BYTES = 16
_CHUNK_ELEMS = 1 << 15
"""What is looked at together: little enough to stay in the cache."""
_BITS_OF = {
    dtype.itemsize: (dtype, torch.iinfo(dtype).min)
    for dtype in (torch.int16, torch.int32, torch.int64)
}
"""By bytes of an element: integers as wide, and the one whose bits are those of minus zero."""


class StepWire(Protocol):
    """How one process tells others of the steps of its reference, no process group taking part."""

    def begin(self, step: int) -> None:
        """Say that a step is being computed."""
        ...

    def tell(self, step: int, owed: Sequence[Mapping[str, Any]] | None) -> None:
        """Tell what a step owes, group by group; None where each is to compute that itself."""
        ...

    def hear(self, step: int) -> Sequence[Mapping[str, Any]] | None:
        """What was told of a step; None also where nothing came, for whatever reason."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class GradDigest:
    """A reduced gradient, as the target is to tell it."""

    digest: str
    is_zero: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDigests:
    """All that one step owes a group: what is small as it is, tensors of the model as digests."""

    step: int
    """Optimizer step, from 0."""
    losses: Mapping[tuple[int, int], Tensor]  # each 0D
    """As in `ReferenceStep`, as are all up to `data_digests`."""
    norm: Tensor  # 0D, fp32
    norm_certified: bool
    zeros: int
    skipped: bool
    loss_scale: float | None
    divisor: float
    nonzero_fraction: float
    scales: Mapping[str, Tensor]  # each 0D, fp32
    data_digests: Mapping[int, str]
    owed: Counter[Guarantee]
    """Elements of the reduced gradients, by why they are owed."""
    grads: Mapping[Span, GradDigest | None]
    """Of what any rank tells; None where the target is to tell none."""
    grads_of_params: Mapping[str, GradDigest | None]
    """Of whole params, where the target shows these; else empty."""
    masters: Mapping[Span, str]
    """Of what any rank owns."""
    state: Mapping[Span, Mapping[str, str]]
    """The same, by torch's key."""
    params: Mapping[str, str]
    """The working params, of all ranks."""

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "step": self.step,
            "losses": [[*at, _as_dict(loss)] for at, loss in self.losses.items()],
            "norm": _as_dict(self.norm),
            "norm_certified": self.norm_certified,
            "zeros": self.zeros,
            "skipped": self.skipped,
            "loss_scale": self.loss_scale,
            "divisor": self.divisor,
            "nonzero_fraction": self.nonzero_fraction,
            "scales": {name: _as_dict(scale) for name, scale in self.scales.items()},
            "data_digests": list(self.data_digests.items()),
            "owed": dict(self.owed),
            "grads": [[*span, _as_list(grad)] for span, grad in self.grads.items()],
            "grads_of_params": {
                name: _as_list(grad) for name, grad in self.grads_of_params.items()
            },
            "masters": [[*span, digest] for span, digest in self.masters.items()],
            "state": [[*span, digests] for span, digests in self.state.items()],
            "params": dict(self.params),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepDigests:
        """What `as_dict` gave."""
        return cls(
            step=data["step"],
            losses={(rank, micro): _tensor(loss) for rank, micro, loss in data["losses"]},
            norm=_tensor(data["norm"]),
            norm_certified=data["norm_certified"],
            zeros=data["zeros"],
            skipped=data["skipped"],
            loss_scale=data["loss_scale"],
            divisor=data["divisor"],
            nonzero_fraction=data["nonzero_fraction"],
            scales={name: _tensor(scale) for name, scale in data["scales"].items()},
            data_digests=dict(data["data_digests"]),
            owed=cast(Counter[Guarantee], Counter(data["owed"])),
            grads={(name, start, stop): _grad(grad) for name, start, stop, grad in data["grads"]},
            grads_of_params={name: _grad(grad) for name, grad in data["grads_of_params"].items()},
            masters={(name, start, stop): each for name, start, stop, each in data["masters"]},
            state={(name, start, stop): each for name, start, stop, each in data["state"]},
            params=data["params"],
        )


def digest_of(tensor: Tensor) -> str:
    """Hash dtype, number of elements and bits of a tensor, as [Note: equal digests] has it."""
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    hashed = hashlib.sha256(f"{tensor.dtype} {flat.numel()} ".encode())
    as_int, minus_zero = torch.uint8, -1
    if flat.is_floating_point():
        # By their bits, which no mode of the processor for numbers near zero changes.
        as_int, minus_zero = _BITS_OF.get(flat.element_size(), (as_int, minus_zero))
    bits = flat.view(as_int).numpy()
    for start in range(0, bits.size, _CHUNK_ELEMS):
        chunk = bits[start : start + _CHUNK_ELEMS]
        # Its bits are those of the least integer.
        if chunk.min() == minus_zero:
            chunk = chunk.copy()
            chunk[chunk == minus_zero] = 0
        hashed.update(chunk.data)
    return hashed.hexdigest()[: 2 * _DIGEST_BYTES]


def digests_of(taken: ReferenceStep, *, group: JudgedGroup) -> StepDigests | None:
    """Hash all that a step owes the ranks of a group, each of which has told what it owns.

    Args:
        taken: The step, as the reference has just taken it.
        group: What is known of the ranks that owe it.

    Returns:
        None where digests are not enough: something is not finite, or not certified.
    """
    is_plain = taken.nonfinite is None and taken.lost is None and bool(taken.norm.isfinite())
    if not is_plain or not taken.clip_certified or taken.one_device is not None:
        return None
    places = [place for owned in group.ownership.places.values() for place in owned]
    spans = dict.fromkeys((place.param, place.start, place.stop) for place in places)
    hashed = _Hashed(taken=taken, group=group)
    for span in spans:
        # What is none of the model's is for invariants to find.
        if span[0] in taken.masters:
            hashed.add_part(span)
    shown = taken.grads if group.shows_grads_of_params else ()
    return StepDigests(
        step=taken.step,
        losses=taken.losses,
        norm=taken.norm,
        norm_certified=taken.norm_certified,
        zeros=taken.zeros,
        skipped=taken.skipped,
        loss_scale=taken.loss_scale,
        divisor=taken.divisor,
        nonzero_fraction=taken.nonzero_fraction,
        scales=taken.scales,
        data_digests={rank: digest.hex() for rank, digest in taken.data_digests.items()},
        owed=owed_by(taken, scenario=group.scenario),
        grads_of_params={
            name: hashed.grad((name, 0, taken.masters[name].numel())) for name in shown
        },
        grads=hashed.grads,
        masters=hashed.masters,
        state=hashed.state,
        params={name: digest_of(param) for name, param in taken.params.items()},
    )


def owed_by(
    taken: ReferenceStep | BoundedStep | StepDigests, *, scenario: Scenario
) -> Counter[Guarantee]:
    """How many elements of a step's reduced gradients are owed, by why.

    Args:
        taken: One that the reference of this process, or of another one, has taken.
        scenario: The case, as the reference replays it.
    """
    if isinstance(taken, StepDigests):
        return taken.owed
    return count_guarantees(
        taken,
        rank_count=scenario.world.size,
        replica_count=scenario.system.redundancy,
        order_known=scenario.world.order_known,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hashed:
    """What was hashed of a step so far, each span once, however many ranks own it."""

    taken: ReferenceStep
    group: JudgedGroup
    grads: dict[Span, GradDigest | None] = field(default_factory=dict)
    masters: dict[Span, str] = field(default_factory=dict)
    state: dict[Span, dict[str, str]] = field(default_factory=dict)
    _told: dict[str, Tensor | None] = field(default_factory=dict)

    def add_part(self, span: Span) -> None:
        name, start, stop = span
        self.grads[span] = self.grad(span)
        self.masters[span] = digest_of(self.taken.masters[name].reshape(-1)[start:stop])
        self.state[span] = {
            key: digest_of(value.reshape(-1)[start:stop] if value.dim() else value)
            for key, value in self.taken.state[name].items()
        }

    def grad(self, span: Span) -> GradDigest | None:
        name, start, stop = span
        if span in self.grads:
            return self.grads[span]
        if name not in self._told:
            numerics = self.group.numerics
            self._told[name] = told_as(
                self.taken, name, point=numerics.told_at, dtype=numerics.told_dtype
            )
        told = self._told[name]
        if told is None:
            return None
        cut = told.reshape(-1)[start:stop]
        return GradDigest(digest=digest_of(cut), is_zero=not bool(cut.any()))


def _as_list(grad: GradDigest | None) -> list[str | bool] | None:
    return None if grad is None else [grad.digest, grad.is_zero]


def _grad(data: Sequence[Any] | None) -> GradDigest | None:
    """What `_as_list` gave."""
    return None if data is None else GradDigest(digest=data[0], is_zero=data[1])


def _as_dict(tensor: Tensor) -> dict[str, Any]:
    """A tensor without dimensions as it is, bits and all."""
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": tensor.device.type,
        "bytes": tensor.detach().reshape(1).view(torch.uint8).cpu().numpy().tobytes().hex(),
    }


def _tensor(data: Mapping[str, str]) -> Tensor:
    """What `_as_dict` gave, on this process's own device."""
    dtype = getattr(torch, data["dtype"])
    value = torch.frombuffer(bytearray.fromhex(data["bytes"]), dtype=dtype)
    return value.reshape(()).to(data["device"])
