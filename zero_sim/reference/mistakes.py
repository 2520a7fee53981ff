"""Alternative steps: the updates of systems that make a known mistake.

Gradients up to a step are those of the reference as long as nothing differed before it, so that
whatever was stepped with other settings can be stepped anew from the start. An update is computed
param by param, once it is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from zero_sim.reference.norms import Holding
from zero_sim.reference.otherwise import OtherUpdate, Otherwise
from zero_sim.reference.partial_sums import PartialSum, partial_sums
from zero_sim.reference.quantization import WorkingParams
from zero_sim.reference.replay import isolated
from zero_sim.reference.stepping import Stepper, lr_factor, torch_defaults
from zero_sim.scenario.spec import OptimizerSpec, Scenario

_WHOLE_PARAM_OPTIMIZERS = {
    "muon": "with each shard orthogonalised by itself",
    "lamb": "with each shard scaled by its own norms",
}
Cut = Callable[[str, Tensor], Sequence[Tensor]]
"""Cuts a param into the tensors that a system steps by themselves; views."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTaken:
    """One step of the reference's optimizer."""

    step: int
    grads: Mapping[str, Tensor]  # each ND, fp32
    """What the optimizer was given, by param that it stepped."""


class StepHistory:
    """The steps of the reference's optimizer, as far as they are kept.

    Args:
        masters: Before the first step, copied.
        elems_max: Elements to keep, of all steps; beyond that none are.
    """

    def __init__(self, masters: Mapping[str, Tensor], *, elems_max: int) -> None:
        self._elems, self._elems_max = sum(each.numel() for each in masters.values()), elems_max
        self._starts: dict[str, Tensor] = {}
        if self._elems <= elems_max:
            self._starts = {name: master.clone() for name, master in masters.items()}
        self._steps: tuple[StepTaken, ...] = ()

    def add(
        self,
        step: int,
        grads: Mapping[str, Tensor],
        *,
        scenario: Scenario,
        working: WorkingParams,
        holdings: Callable[[], Sequence[Sequence[Holding]]],
        otherwise: Otherwise | None,
    ) -> Mistakes | None:
        """Note a step, and return the mistakes that it can be taken with.

        Args:
            step: Its index, from 0.
            grads: As `StepTaken` has them; none of a step that was skipped.
            scenario: The case as it is from this step on.
            working: The form of the working params in the step.
            holdings: As `Mistakes` has them.
            otherwise: As `Mistakes` has it.
        """
        if not self._starts or not grads:
            return None
        self._steps += (StepTaken(step=step, grads=grads),)
        if len(self._steps) * self._elems > self._elems_max:
            self._starts, self._steps = {}, ()
            return None
        system = scenario.system
        return Mistakes(
            spec=scenario.optimizer,
            starts=self._starts,
            steps=self._steps,
            working=working,
            on_host=system.offload_state,
            shard_count=scenario.world.size // system.redundancy,
            holdings=holdings,
            otherwise=otherwise,
        )


@dataclass(frozen=True, kw_only=True)
class Mistakes:
    """The steps so far, and how a faulty system would have taken them.

    A mistake is named as a part of a sentence: `with torch's default lr 0.001 in place of 0.02`.
    """

    spec: OptimizerSpec
    starts: Mapping[str, Tensor]  # each ND, fp32
    """Masters before the first of the steps."""
    steps: Sequence[StepTaken]
    working: WorkingParams
    on_host: bool
    shard_count: int
    """Ranks that share a param, where each has a shard."""
    holdings: Callable[[], Sequence[Sequence[Holding]]]
    """Gives the parts of params that each rank owns; none if nobody reported them."""
    otherwise: Otherwise | None
    """What the last update started from, if gradients are not compared by themselves."""

    assumed = "as the reference"

    def singles(self) -> list[str]:
        """Mistakes in one thing."""
        settings = [name for name, changes in self._settings.items() if len(changes) == 1]
        return [*settings, *self._cuts, *self._sums]

    def pairs(self) -> list[str]:
        """Mistakes in several settings, the fewest first."""
        return [name for name, changes in self._settings.items() if len(changes) > 1]

    def update(self, rule: str) -> Callable[[int], OtherUpdate]:
        """Return what gives the update of a rank.

        Args:
            rule: One of `singles` or `pairs`, or `assumed`.
        """
        if rule in self._sums:
            return _ByRank(mistakes=self, partial=self._sums[rule])
        spec = replace(self.spec, **self._settings.get(rule, {}))
        update = self._update(spec, cut=self._cuts.get(rule, _uncut))
        return lambda rank: update

    @cached_property
    def _settings(self) -> dict[str, dict[str, Any]]:
        """By name: fields of the spec that a system may not have read."""
        spec = self.spec
        single: dict[str, dict[str, Any]] = {}
        for option, default in torch_defaults(spec.name).items():
            own = getattr(spec, option)
            if default != own:
                name = f"torch's default {option} {default} in place of {own}"
                single[name] = {option: default}
        if spec.groups:
            single["the same settings for all params in place of groups"] = {"groups": ()}
        if spec.warmup_steps:
            single["a constant lr in place of a warm-up"] = {"warmup_steps": 0}
        return {
            f"with {', '.join(names)}": changes
            for count in range(1, len(single) + 1)
            for names in combinations(single, count)
            if _is_valid(changes := {k: v for name in names for k, v in single[name].items()}, spec)
        }

    @cached_property
    def _cuts(self) -> dict[str, Cut]:
        """By name: shards that a system may have stepped by themselves."""
        name = _WHOLE_PARAM_OPTIMIZERS.get(self.spec.name)
        if name is None:
            return {}
        cuts: dict[str, Cut] = {}
        is_muon, count = self.spec.name == "muon", self.shard_count
        if is_muon:
            cuts["with no param orthogonalised"] = lambda _, tensor: [tensor.reshape(-1)]
        if spans := self._spans():
            cuts[name] = lambda param, tensor: _cut_at(tensor, spans.get(param, []))
        elif count > 1:
            forms = {"rows": torch.atleast_1d} | ({} if is_muon else {"elements": torch.flatten})
            for form, rows in forms.items():
                for how in (torch.chunk, torch.tensor_split):
                    key = f"{name}, {form} dealt out by torch.{how.__name__}"
                    cuts[key] = lambda _, t, how=how, rows=rows: how(rows(t), count)
        # Where shards come out alike, one way to deal them out is as good as another.
        alike = {self._sizes(cut): key for key, cut in reversed(cuts.items())}
        return {key: cuts[key] for key in reversed(alike.values())}

    def _sizes(self, cut: Cut) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(piece.numel() for piece in cut(name, tensor) if piece.numel())
            for name, tensor in self.starts.items()
        )

    def _spans(self) -> dict[str, list[tuple[int, int]]]:
        spans: dict[str, list[tuple[int, int]]] = {}
        for held in self.holdings():
            for part in held:
                spans.setdefault(part.param, []).append((part.start, part.stop))
        return {name: sorted(found) for name, found in spans.items()}

    @cached_property
    def _sums(self) -> dict[str, PartialSum]:
        """By name: gradients that lack terms."""
        if self.otherwise is None or self.otherwise.sums is None:
            return {}
        return {
            f"by the gradient of {partial.name}": partial
            for partial in partial_sums(self.otherwise.sums)
        }

    def _update(self, spec: OptimizerSpec, *, cut: Cut) -> OtherUpdate:
        stepped = self.steps[-1].grads
        moved = _PerParam(lambda name: self._moved(name, spec, cut))
        return OtherUpdate(
            masters=_PerParam(lambda name: moved[name][0]),
            state=_PerParam(lambda name: moved[name][1]),
            params=_PerParam(
                lambda name: self.working.cast(name, moved[name][0], is_stepped=name in stepped)
            ),
        )

    def _moved(
        self, name: str, spec: OptimizerSpec, cut: Cut
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The master and the optimizer state of a param after all steps."""
        start = self.starts[name]
        # The end of the name, by which groups match, stays.
        pieces = {f"{index}.{name}": each for index, each in enumerate(cut(name, start))}
        with isolated():
            stepper = Stepper(spec, params=pieces, on_host=self.on_host)
            for taken in self.steps:
                if name in taken.grads:
                    grads = dict(zip(pieces, cut(name, taken.grads[name]), strict=True))
                    grads = {key: grad.contiguous() for key, grad in grads.items()}
                    stepper.step(grads, factor=lr_factor(spec, step=taken.step))
        states = list(stepper.state().values())
        state = {
            key: _joined([each[key] for each in states], like=start) if value.dim() else value
            for key, value in states[0].items()
        }
        return _joined(list(stepper.masters.values()), like=start), state


@dataclass(frozen=True, kw_only=True, slots=True)
class _ByRank:
    """The update by a partial sum, which may be another one on every rank."""

    mistakes: Mistakes
    partial: PartialSum
    known: dict[int, OtherUpdate] = field(default_factory=dict)

    def __call__(self, rank: int) -> OtherUpdate:
        observer = rank if self.partial.is_local else 0
        if observer not in self.known:
            otherwise = self.mistakes.otherwise
            assert otherwise is not None
            assert otherwise.sums is not None
            sums = {
                name: self.partial.of_param(otherwise.sums, name, rank=observer)
                for name in otherwise.grads
            }
            held = {name: each for name, each in sums.items() if each is not None}
            self.known[observer] = otherwise.update_by(held)
        return self.known[observer]


class _PerParam(dict[str, Any]):
    """Values by param, each computed once it is read."""

    def __init__(self, compute: Callable[[str], Any]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, name: str) -> Any:
        self[name] = value = self._compute(name)
        return value


def _is_valid(changes: Mapping[str, Any], spec: OptimizerSpec) -> bool:
    """Whether torch takes these settings."""
    changed = replace(spec, **changes)
    return not (spec.name == "sgd" and changed.nesterov and not changed.momentum)


def _uncut(_: str, tensor: Tensor) -> Sequence[Tensor]:
    return [tensor]


def _cut_at(tensor: Tensor, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Cut a param into parts: into rows where a part has whole ones, else into flat parts."""
    return list(_parts(tensor, spans)) or [tensor]


def _parts(tensor: Tensor, spans: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    flat = tensor.reshape(-1)
    row = max(1, tensor.numel() // max(1, tensor.size(0))) if tensor.dim() > 1 else 0
    for start, stop in spans:
        part = flat[start:stop]
        is_rows = row and start % row == 0 and stop % row == 0
        yield part.reshape(-1, *tensor.shape[1:]) if is_rows else part


def _joined(pieces: Sequence[Tensor], *, like: Tensor) -> Tensor:
    return torch.cat([piece.reshape(-1) for piece in pieces]).view_as(like)
