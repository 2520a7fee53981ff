"""Bits of an elementwise rule, which may depend on where a tensor is cut.

[Note: ends of loops]
A vectorised loop takes elements by a width that is a power of two, and the rest one by one. There
`pow` and `sigmoid` round otherwise. The rest of a width lies in the rest of every larger width. So
an element has, in any tensor, the bits that it has in a chunk of one of `_CHUNKS`: smaller widths
fill the chunk, and larger ones leave all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from zero_sim.reference.replay import isolated
from zero_sim.reference.rules import Rules
from zero_sim.reference.stepping import Stepper, group_of, pick, same_elements
from zero_sim.scenario.spec import OptimizerSpec

_BODY_ELEMS = 128
"""Elements that no loop takes one by one: at most 128 of a byte are taken at once."""
_TAIL_ELEMS = 7
"""Elements that every loop takes one by one: no fewer than 8 of float32 are taken at once."""
_CHUNKS = (_TAIL_ELEMS, 8, 16, 32, 64, _BODY_ELEMS)
_FIRST_ELEMS, _BATCH_ELEMS = 28, 7 * 128
"""Elements tried together. A system with a fault differs in most, which the first ones show."""
_PROBED_STEPS = 2
"""The second one has state."""
_LR = 0.1

Values = Mapping[str, Tensor]  # each 1D
"""Values of some elements: state by key, and the param itself under an empty one."""
Holds = Callable[[Tensor, Values], Tensor]
"""From elements and values that they may have, which of them do have these: 1D, bool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """How the bits of a rule that is declared elementwise depend on other elements."""

    problem: str = ""
    """Why it is not elementwise; empty if it is, but for ends of loops."""
    counters: frozenset[str] = frozenset()
    """Keys of state that no element has its own of."""


def probe(spec: OptimizerSpec, *, rules: Rules, params: Mapping[str, Tensor]) -> Probe:
    """Try a rule of a target on drawn values, beside others and elsewhere.

    Args:
        spec: Optimizer and its settings.
        rules: The target's rule among them.
        params: By name; one is tried of each group, dtype and number of dimensions.
    """
    found = [_probe_one(each) for each in _tried(spec, rules, params)]
    return Probe(
        problem=next((each.problem for each in found if each.problem), ""),
        counters=frozenset[str]().union(*(each.counters for each in found)),
    )


def why_unknown(
    spec: OptimizerSpec, *, rules: Rules, params: Mapping[str, Tensor], shows_cuts: bool = True
) -> str:
    """Return in words why the bits that a rule gives a shard are not known; empty if they are.

    Args:
        spec: As for `probe`.
        rules: As for `probe`.
        params: As for `probe`.
        shows_cuts: True if the reference can go on with the bits that the system has.
    """
    own, problem = rules.own, probe(spec, rules=rules, params=params).problem
    # State that a function returns may be a copy, which cannot be changed.
    if problem or own is None or (shows_cuts and own.read_state is None):
        return problem
    ends = next(filter(None, map(_ends_of, _tried(spec, rules, params))), "")
    if not ends:
        return ""
    return (
        f"the bits of {own.name} depend on where a tensor is cut, in {ends}, and where this case "
        "cuts it is not known. Try one process, a target with parts(), or fewer elements; or round "
        "off `pow`, `sigmoid` and the like by operations that are exact everywhere"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tried:
    """A rule and one kind of param; of cases with the same settings one is enough."""

    spec: OptimizerSpec
    by: tuple[object, object]
    name: str
    dtype: torch.dtype
    dims: int
    device: str
    rules: Rules = field(compare=False)

    def stepped(self, elems: Tensor) -> dict[str, Tensor]:
        """Step drawn values; the same ones have the same index."""
        draws = torch.Generator().manual_seed(0)
        values = torch.randn((_PROBED_STEPS + 1, 3 * _BODY_ELEMS), generator=draws)
        # Params so small that a sum with an update keeps all of the update's bits.
        values[0] *= 2.0**-20
        shape = (1,) * (self.dims - 1) + (-1,)
        first, *grads = (each[elems].view(shape).to(self.device) for each in values)
        stepper = Stepper(self.spec, params={self.name: first.to(self.dtype)}, rules=self.rules)
        with isolated():
            for grad in grads:
                stepper.step({self.name: grad}, repeated=False)
        return stepper.values(self.name)


def _tried(spec: OptimizerSpec, rules: Rules, params: Mapping[str, Tensor]) -> Sequence[_Tried]:
    if rules.own is None or not rules.own.elementwise:
        return ()
    names = {
        (group_of(spec, name=name), param.dtype, param.dim()): name
        for name, param in params.items()
    }
    return [
        _Tried(
            # Whether a rule is elementwise depends on no number of these.
            spec=replace(spec, lr=_LR, warmup_steps=0, clip_norm=None, clip_value=None),
            by=(rules.own.step, rules.own.build),
            name=name,
            dtype=torch.float32 if rules.masters == "fp32" else params[name].dtype,
            dims=params[name].dim(),
            device=str(params[name].device),
            rules=rules,
        )
        for name in names.values()
    ]


@lru_cache(maxsize=256)
def _probe_one(tried: _Tried) -> Probe:
    body, tail = torch.arange(_BODY_ELEMS), torch.arange(_TAIL_ELEMS)
    back = body.flip(0)
    # Elsewhere, beside others, and in a tensor of another size.
    moved = torch.cat([back, torch.arange(_BODY_ELEMS, 3 * _BODY_ELEMS)])
    whole, other, short = tried.stepped(body), tried.stepped(moved), tried.stepped(tail)
    pairs = [(whole, {k: v[back] if v.dim() else v for k, v in other.items()})]
    for at in (0, _TAIL_ELEMS - 1):
        of_tail = {k: v[at : at + 1] if v.dim() else v for k, v in short.items()}
        pairs.append((of_tail, tried.stepped(tail[at : at + 1])))
    for one, two in pairs:
        for key in one.keys() | two.keys():
            if key not in one or key not in two or not _is_same(one[key], two[key]):
                return Probe(problem=_problem(tried.rules, key, tried.name))
    return Probe(counters=frozenset(key for key, value in whole.items() if not value.dim()))


@lru_cache(maxsize=256)
def _ends_of(tried: _Tried) -> str:
    """Return in words where bits differ at ends of loops; empty for nowhere."""
    body = torch.arange(_BODY_ELEMS)
    whole, tails = tried.stepped(body), [tried.stepped(each) for each in body.split(_TAIL_ELEMS)]
    for key, value in whole.items():
        if value.dim() and not _is_same(value, torch.cat([each[key] for each in tails])):
            return _where(key, tried.name)
    return ""


def _is_same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and bool(same_elements(first, second).all())


def _where(key: str, name: str) -> str:
    return f"{f'state {key!r}' if key else 'the value'} of param {name!r}"


def _problem(rules: Rules, key: str, name: str) -> str:
    assert rules.own is not None
    return (
        f"the bits of {rules.own.name} depend on where a tensor is cut, in {_where(key, name)}, "
        "and not at its end alone, so those of a shard are not known. Let the step of an element "
        "depend on that element alone, not on others or on their number; or declare "
        "elementwise=False if your system steps whole params"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CutStep:
    """A step of one param by an elementwise rule."""

    start: Stepper
    """Masters and optimizer before the step; not to be stepped itself."""
    name: str
    grad: Tensor  # ND, fp32
    """As `Stepper.step` took it."""
    factor: float
    counters: frozenset[str]
    """As in `Probe`."""

    def bits_elsewhere(self, index: Tensor, *, holds: Holds) -> Values | None:
        """Return the values that elements have wherever they are; None if one has no such values.

        See [Note: ends of loops].

        Args:
            index: 1D, flattened elements; at least one.
            holds: Decides which values they have.
        """
        found: list[Values] = []
        first, rest = index[:_FIRST_ELEMS], index[_FIRST_ELEMS:]
        with isolated():
            for batch in filter(Tensor.numel, (first, *rest.split(_BATCH_ELEMS))):
                chosen: dict[str, Tensor] = {}
                left = torch.ones_like(batch, dtype=torch.bool)
                for values in self._tried(batch):
                    hit = left & holds(batch, values)
                    left &= ~hit
                    for key, value in values.items():
                        chosen.setdefault(key, value.clone())[hit] = value[hit]
                if bool(left.any()):
                    return None
                found.append(chosen)
        return {key: torch.cat([each[key] for each in found]) for key in found[0]}

    def _tried(self, index: Tensor) -> Iterator[Values]:
        count = index.numel()
        for length in _CHUNKS:
            filled = -(-count // length) * length
            pieces: list[Values] = []
            for piece in index[torch.arange(filled) % count].split(length):
                stepper = self.start.picked(self.name, piece, counters=self.counters)
                stepper.step(
                    {self.name: pick(self.grad, piece)}, factor=self.factor, repeated=False
                )
                values = stepper.values(self.name, counters=self.counters)
                pieces.append({k: v for k, v in values.items() if v.shape == piece.shape})
            yield {key: torch.cat([each[key] for each in pieces])[:count] for key in pieces[0]}
