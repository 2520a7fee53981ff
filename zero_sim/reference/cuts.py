"""Dependence of an elementwise rule's bits on where a tensor is cut.

[Note: ends of loops]
A vectorised loop takes groups of elements, whose size (the width) is a power of two, and takes the
remainder singly. `pow` and `sigmoid` round differently in this remainder. An element in one width's
remainder is also in every larger width's remainder. So in any tensor, an element has the same bits
as in a chunk with some length from `_CHUNKS`: smaller widths fill the chunk, and larger widths
leave all of it as remainder.
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

# A chunk without a remainder, because widths are at most 128, for single bytes.
_BODY_ELEMS = 128
# A chunk that is all remainder, because widths are at least 8, for float32.
_TAIL_ELEMS = 7
_CHUNKS = (_TAIL_ELEMS, 8, 16, 32, 64, _BODY_ELEMS)
# Elements per batch. In a faulty system most elements differ, so a small first batch exits early.
_FIRST_ELEMS, _BATCH_ELEMS = 28, 7 * 128
# Only the second step has state to start from.
_PROBED_STEPS = 2
_LR = 0.1

Values = Mapping[str, Tensor]  # each 1D
"""Some elements' values: state by key, and the param itself by the empty key."""
Holds = Callable[[Tensor, Values], Tensor]
"""Returns True for elements that have the given values: 1D, bool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Dependence of an elementwise rule's bits on other elements."""

    problem: str = ""
    """Reason why the rule is not elementwise; empty if it is, apart from ends of loops."""
    counters: frozenset[str] = frozenset()
    """State keys shared by all elements, such as a step count."""


def probe(spec: OptimizerSpec, *, rules: Rules, params: Mapping[str, Tensor]) -> Probe:
    """Run a target's rule on drawn values, with other neighbours and at other positions.

    One param is tried per group, dtype and number of dimensions.
    """
    found = [_probe_one(each) for each in _tried(spec, rules, params)]
    return Probe(
        problem=next((each.problem for each in found if each.problem), ""),
        counters=frozenset[str]().union(*(each.counters for each in found)),
    )


def why_unknown(
    spec: OptimizerSpec, *, rules: Rules, params: Mapping[str, Tensor], shows_cuts: bool = True
) -> str:
    """Return the reason why a rule's bits on a shard are unknown; empty if known.

    `shows_cuts` is True if the reference can continue from the system's bits.
    """
    own, problem = rules.own, probe(spec, rules=rules, params=params).problem
    # A custom reader may return copies of state, which cannot be overwritten.
    if problem or own is None or (shows_cuts and own.read_state is None):
        return problem
    ends = next(filter(None, map(_ends_of, _tried(spec, rules, params))), "")
    if not ends:
        return ""
    return (
        f"the bits of {own.name} depend on where a tensor is cut, in {ends}, and this case's "
        "cuts are not known. Try one process, a target with parts(), or fewer elements; or replace "
        "`pow`, `sigmoid` and the like by operations that are exact everywhere"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tried:
    """A rule and one kind of param. Equal settings need only one trial."""

    spec: OptimizerSpec
    by: tuple[object, object]
    name: str
    dtype: torch.dtype
    dims: int
    device: str
    rules: Rules = field(compare=False)

    def stepped(self, elems: Tensor) -> dict[str, Tensor]:
        """Step drawn values; equal indices get equal values."""
        draws = torch.Generator().manual_seed(0)
        # [1 + steps, elements]: initial params, then gradients
        values = torch.randn((_PROBED_STEPS + 1, 3 * _BODY_ELEMS), generator=draws)
        # Small params, so that adding an update does not round its bits away.
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
    # One param per kind is enough, because bits depend on nothing else in it.
    names = {
        (group_of(spec, name=name), param.dtype, param.dim()): name
        for name, param in params.items()
    }
    return [
        _Tried(
            # No number among these settings decides if a rule is elementwise.
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
    # Other positions, other neighbours, another size.
    moved = torch.cat([back, torch.arange(_BODY_ELEMS, 3 * _BODY_ELEMS)])
    whole, other, short = tried.stepped(body), tried.stepped(moved), tried.stepped(tail)
    # Scalars of state are shared by all elements, so they are compared as they are.
    pairs = [(whole, {k: v[back] if v.dim() else v for k, v in other.items()})]
    # A single element against the same element with neighbours, at both ends.
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
    """Describe where bits differ at ends of loops; empty if nowhere."""
    body = torch.arange(_BODY_ELEMS)
    # The same elements, once in the body of a loop and once in remainders.
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
        "and not only at its end, so a shard's bits are not known. Let each element's step depend "
        "on this element alone, not on other elements or their number; or declare "
        "elementwise=False if your system steps whole params"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CutStep:
    """A step of a single param by an elementwise rule."""

    start: Stepper
    """Masters and optimizer before the step; do not step it."""
    name: str
    grad: Tensor  # ND, fp32
    """Gradient, as for `Stepper.step`."""
    factor: float
    counters: frozenset[str]
    """See `Probe`."""

    def bits_elsewhere(self, index: Tensor, *, holds: Holds) -> Values | None:
        """Return bits that all elements can have under some cut; None if an element has none.

        See [Note: ends of loops].

        Args:
            index: 1D, flattened elements; at least one.
            holds: Decides if elements have the given values.
        """
        found: list[Values] = []
        first, rest = index[:_FIRST_ELEMS], index[_FIRST_ELEMS:]
        with isolated():
            for batch in filter(Tensor.numel, (first, *rest.split(_BATCH_ELEMS))):
                # Elements not yet explained; each chunk length explains some of them.
                chosen: dict[str, Tensor] = {}
                left = torch.ones_like(batch, dtype=torch.bool)
                for values in self._tried(batch):
                    hit = left & holds(batch, values)
                    left &= ~hit
                    for key, value in values.items():
                        # Only elements whose bits this chunk length explains.
                        chosen.setdefault(key, value.clone())[hit] = value[hit]
                if bool(left.any()):
                    return None
                found.append(chosen)
        return {key: torch.cat([each[key] for each in found]) for key in found[0]}

    def _tried(self, index: Tensor) -> Iterator[Values]:
        count = index.numel()
        for length in _CHUNKS:
            # Repeat the first elements so that the last chunk has its full length.
            filled = -(-count // length) * length
            pieces: list[Values] = []
            for piece in index[torch.arange(filled) % count].split(length):
                stepper = self.start.picked(self.name, piece, counters=self.counters)
                stepper.step(
                    {self.name: pick(self.grad, piece)}, factor=self.factor, repeated=False
                )
                # State of another shape, such as a step count, is not per element.
                values = stepper.values(self.name, counters=self.counters)
                pieces.append({k: v for k, v in values.items() if v.shape == piece.shape})
            yield {key: torch.cat([each[key] for each in pieces])[:count] for key in pieces[0]}
