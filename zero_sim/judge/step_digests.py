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
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from zero_sim.judge.guarantee import Guarantee, count_guarantees
from zero_sim.judge.judged_group import JudgedGroup, cut_state
from zero_sim.judge.told import told_as
from zero_sim.reference import BoundedStep, ReferenceStep
from zero_sim.scenario.spec import Scenario

_DIGEST_BYTES = 16
_CHUNK_ELEMS = 1 << 15
"""What is looked at together: little enough to stay in the cache."""
_BITS_OF = {
    dtype.itemsize: (dtype, torch.iinfo(dtype).min)
    for dtype in (torch.int16, torch.int32, torch.int64)
}
"""By bytes of an element: integers as wide, and the one whose bits are those of minus zero."""


def key_of(what: str, *where: object) -> str:
    """Return the key of a tensor among the digests of a step.

    Args:
        what: `loss`, `norm`, `grad`, `whole grad`, `master`, `state`, `scale` or `param`.
        where: Rank and micro-batch; or the name of a param, then half-open elements of it, if what
            a rank owns is part of one, and torch's key of a state.
    """
    return " ".join(map(str, (what, *where)))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDigests:
    """Everything that one step owes a group; tensors as digests."""

    nonfinite: ClassVar[None] = None
    clip_certified: ClassVar[bool] = True
    cut_dependence: ClassVar[str] = ""

    step: int
    """Optimizer step, from 0."""
    norm: float
    """As in `ReferenceStep`, as are all up to `data_digests`."""
    zeros: int
    skipped: bool
    loss_scale: float | None
    divisor: float
    nonzero_fraction: float
    data_digests: Mapping[str, str]
    owed: Mapping[Guarantee, int]
    """Elements of the reduced gradients, by why they are owed."""
    digests: Mapping[str, str]
    """By key; without gradients that the target is to report none of, and without a norm that
    depends on the order of addition."""
    zero_grads: Sequence[str]
    """Keys of gradients whose elements are all zero."""
    state_keys: Mapping[str, Sequence[str]]
    """By param torch's keys of its state, sorted."""
    scale_names: Sequence[str]
    """Names of the params in fp8."""
    unmoved: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return asdict(self)

    def agrees(self, got: Tensor, what: str, *where: object) -> bool:
        """Return whether a tensor has the digest of a key."""
        return self.digests.get(key_of(what, *where)) == digest_of(got)


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
    hashed = _Hashed(taken=taken, group=group)
    places = [place for owned in group.ownership.places.values() for place in owned]
    for name, start, stop in dict.fromkeys((each.param, each.start, each.stop) for each in places):
        # What is none of the model's is for invariants to find.
        if name in taken.masters:
            hashed.add_part(name, start, stop)
    for name in taken.grads if group.shows_grads_of_params else ():
        hashed.add_grad("whole grad", name)
    for at, loss in taken.losses.items():
        hashed.add(loss, "loss", *at)
    for name, scale in taken.scales.items():
        hashed.add(scale, "scale", name)
    for name, param in taken.params.items():
        hashed.add(param, "param", name)
    if taken.measured.norm_certified:
        hashed.add(taken.norm, "norm")
    return StepDigests(
        step=taken.step,
        norm=taken.norm.item(),
        zeros=taken.measured.zeros,
        skipped=taken.skipped,
        loss_scale=taken.loss_scale,
        divisor=taken.divisor,
        nonzero_fraction=taken.nonzero_fraction,
        data_digests={str(rank): digest.hex() for rank, digest in taken.data_digests.items()},
        owed=dict(owed_by(taken, scenario=group.scenario)),
        digests=hashed.digests,
        zero_grads=hashed.zero_grads,
        state_keys={name: sorted(state) for name, state in taken.state.items()},
        scale_names=list(taken.scales),
        unmoved=sorted(taken.unmoved),
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
        return Counter(taken.owed)
    return count_guarantees(
        taken,
        rank_count=scenario.world.size,
        replica_count=scenario.system.redundancy,
        order_known=scenario.world.order_known,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hashed:
    """Digests of a step so far."""

    taken: ReferenceStep
    group: JudgedGroup
    digests: dict[str, str] = field(default_factory=dict)
    zero_grads: list[str] = field(default_factory=list)

    def add(self, tensor: Tensor, what: str, *where: object) -> None:
        self.digests[key_of(what, *where)] = digest_of(tensor)

    def add_part(self, name: str, start: int, stop: int) -> None:
        """Hash all of a part that a rank owns."""
        self.add_grad("grad", name, start, stop)
        master = self.taken.masters[name]
        self.add(master.reshape(-1)[start:stop], "master", name, start, stop)
        for key, value in self.taken.state[name].items():
            cut = cut_state(value, master=master, start=start, stop=stop)
            self.add(cut, "state", name, start, stop, key)

    def add_grad(self, what: str, name: str, *span: int) -> None:
        """Hash a gradient as the target is to report it, if it is to."""
        numerics = self.group.numerics
        told = told_as(self.taken, name, point=numerics.told_at, dtype=numerics.told_dtype)
        if told is None:
            return
        cut = told.reshape(-1)[slice(*span) if span else slice(None)]
        self.add(cut, what, name, *span)
        if not cut.any():
            self.zero_grads.append(key_of(what, name, *span))
