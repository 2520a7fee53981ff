"""Digests of a step's expected tensors, for judges in other processes.

If each rank is judged in its own process, only one process runs the reference. It sends digests of
each step. If a rank's digests differ, its judge runs the reference itself and compares element by
element, so findings never depend on digests.

[Note: equal digests]
Elements that are equal by [Note: the rule for equality] have equal digests, except NaNs. If NaN is
expected, no digests are sent.
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
from zero_sim.judge.reported_grads import as_reported
from zero_sim.reference import BoundedStep, ReferenceStep
from zero_sim.scenario.spec import Scenario

_DIGEST_BYTES = 16
_CHUNK_ELEMS = 1 << 15
"""Elements to hash at once: few enough to stay in the cache."""
_BITS_OF = {
    dtype.itemsize: (dtype, torch.iinfo(dtype).min)
    for dtype in (torch.int16, torch.int32, torch.int64)
}
"""Integer dtype and the bits of minus zero, by width in bytes."""


def key_of(what: str, *where: object) -> str:
    """Return a tensor's key among a step's digests.

    Args:
        what: `loss`, `norm`, `grad`, `whole grad`, `master`, `state`, `scale` or `param`.
        where: Rank and micro-batch for a loss. Otherwise the param, then start and stop for a part,
            then torch's key for state.
    """
    return " ".join(map(str, (what, *where)))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDigests:
    """Expected results of a group's step, with digests in place of tensors."""

    # As in `ReferenceStep`. Steps with other values are not sent as digests.
    nonfinite: ClassVar[None] = None
    clip_certified: ClassVar[bool] = True
    cut_dependence: ClassVar[str] = ""

    step: int
    norm: float
    """As in `ReferenceStep`, like all fields up to `data_digests`."""
    zeros: int
    skipped: bool
    loss_scale: float | None
    divisor: float
    nonzero_fraction: float
    data_digests: Mapping[str, str]
    guarantees: Mapping[Guarantee, int]
    """Reduced gradient elements, by guarantee."""
    digests: Mapping[str, str]
    """Digests by key, without unreported gradients, and without a norm that depends on the order of
    addition."""
    zero_grads: Sequence[str]
    """Keys of all-zero gradients."""
    state_keys: Mapping[str, Sequence[str]]
    """Sorted optimizer state keys, by param."""
    scale_names: Sequence[str]
    unmoved: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return asdict(self)

    def agrees(self, got: Tensor, what: str, *where: object) -> bool:
        """Return True if a tensor has the expected digest."""
        return self.digests.get(key_of(what, *where)) == digest_of(got)


def digest_of(tensor: Tensor) -> str:
    """Hash a tensor's dtype, length and bits; see [Note: equal digests]."""
    # Dtype and length too, because tensors of other dtypes can have the same bytes.
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    hashed = hashlib.sha256(f"{tensor.dtype} {flat.numel()} ".encode())
    # No uint8 equals -1, so other dtypes than floats are hashed unchanged.
    as_int, minus_zero = torch.uint8, -1
    if flat.is_floating_point():
        # As integers, because flush-to-zero modes affect float comparisons.
        as_int, minus_zero = _BITS_OF.get(flat.element_size(), (as_int, minus_zero))
    bits = flat.view(as_int).numpy()
    for start in range(0, bits.size, _CHUNK_ELEMS):
        chunk = bits[start : start + _CHUNK_ELEMS]
        # Minus zero has the bits of the least integer. Hash it as zero, and copy only if needed.
        if chunk.min() == minus_zero:
            chunk = chunk.copy()
            chunk[chunk == minus_zero] = 0
        hashed.update(chunk.data)
    # Two hex digits per byte.
    return hashed.hexdigest()[: 2 * _DIGEST_BYTES]


def digests_of(taken: ReferenceStep, *, group: JudgedGroup) -> StepDigests | None:
    """Hash all expected tensors of a step.

    Args:
        taken: The reference's last step.
        group: The judged group, after all ranks have reported their places.

    Returns:
        None if digests are not enough, because values are not finite or not certified.
    """
    # A digest cannot express that several results are allowed.
    is_plain = taken.nonfinite is None and taken.lost is None and bool(taken.norm.isfinite())
    if not is_plain or not taken.clip_certified or taken.one_device is not None:
        return None
    hashed = _Hashed(taken=taken, group=group)
    places = [place for owned in group.ownership.places.values() for place in owned]
    # Replicas own equal parts, so remove duplicates.
    for name, start, stop in dict.fromkeys((each.param, each.start, each.stop) for each in places):
        # The ownership check reports unknown params.
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
        guarantees=dict(guarantees_of(taken, scenario=group.scenario)),
        digests=hashed.digests,
        zero_grads=hashed.zero_grads,
        state_keys={name: sorted(state) for name, state in taken.state.items()},
        scale_names=list(taken.scales),
        unmoved=sorted(taken.unmoved),
    )


def guarantees_of(
    taken: ReferenceStep | BoundedStep | StepDigests, *, scenario: Scenario
) -> Counter[Guarantee]:
    """Count a step's reduced gradient elements, by guarantee.

    Args:
        taken: The step, or its digests.
        scenario: The case, as replayed by the reference.
    """
    if isinstance(taken, StepDigests):
        return Counter(taken.guarantees)
    return count_guarantees(
        taken,
        rank_count=scenario.world.size,
        replica_count=scenario.system.redundancy,
        order_known=scenario.world.order_known,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hashed:
    """Digests of a step, under construction."""

    taken: ReferenceStep
    group: JudgedGroup
    digests: dict[str, str] = field(default_factory=dict)
    zero_grads: list[str] = field(default_factory=list)

    def add(self, tensor: Tensor, what: str, *where: object) -> None:
        self.digests[key_of(what, *where)] = digest_of(tensor)

    def add_part(self, name: str, start: int, stop: int) -> None:
        """Hash a part's gradient, master and state."""
        self.add_grad("grad", name, start, stop)
        master = self.taken.masters[name]
        self.add(master.reshape(-1)[start:stop], "master", name, start, stop)
        for key, value in self.taken.state[name].items():
            cut = cut_state(value, master=master, start=start, stop=stop)
            self.add(cut, "state", name, start, stop, key)

    def add_grad(self, what: str, name: str, *span: int) -> None:
        """Hash a gradient in the target's form, if the target reports it."""
        numerics = self.group.numerics
        reported = as_reported(
            self.taken, name, point=numerics.reported_at, dtype=numerics.reported_dtype
        )
        if reported is None:
            return
        cut = reported.reshape(-1)[slice(*span) if span else slice(None)]
        self.add(cut, what, name, *span)
        if not cut.any():
            # Engines may report None for these.
            self.zero_grads.append(key_of(what, name, *span))
