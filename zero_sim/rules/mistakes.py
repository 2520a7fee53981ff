"""Alternative steps: updates by systems with a known fault.

Before the first difference, gradients equal the reference's. So all steps can be repeated from the
start with other settings. Each param is updated only when it is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from zero_sim.reference import Again, StepAgain, Terms
from zero_sim.reference.replay import isolated
from zero_sim.reference.stepping import Stepper, lr_factor, torch_defaults
from zero_sim.reference.steps import OptimizerHistory, OptimizerStep
from zero_sim.scenario.spec import OptimizerSpec

_WHOLE_PARAM_OPTIMIZERS = {
    "muon": "with each shard orthogonalised by itself",
    "lamb": "with each shard scaled by its own norms",
}
Cut = Callable[[str, Tensor], Sequence[Tensor]]
"""Cuts a param into separately stepped tensors; views."""


@dataclass(frozen=True, kw_only=True)
class Mistakes:
    """The steps so far, repeated with known faults.

    Names complete a sentence: `with torch's default lr 0.001 in place of 0.02`.
    """

    again: Again
    """The last step; earlier steps are in its history."""
    sums: Mapping[str, Terms]
    """Terms in incomplete gradients, by name."""

    assumed = "as the reference"

    def singles(self) -> dict[str, StepAgain]:
        """Return the step with a single fault."""
        settings = {name: each for name, each in self._settings.items() if len(each) == 1}
        cuts = {name: self._stepped(self._spec, cut) for name, cut in self._cuts.items()}
        sums = {
            f"by the gradient of {name}": self.again.by(terms=terms)
            for name, terms in self.sums.items()
        }
        return self._by(settings) | cuts | sums

    def pairs(self) -> dict[str, StepAgain]:
        """Return the step with several wrong settings, fewest first."""
        return self._by({name: each for name, each in self._settings.items() if len(each) > 1})

    def _by(self, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, StepAgain]:
        return {
            name: self._stepped(replace(self._spec, **changes), _uncut)
            for name, changes in settings.items()
        }

    @property
    def _spec(self) -> OptimizerSpec:
        return self.again.scenario.optimizer

    @property
    def _history(self) -> OptimizerHistory:
        history = self.again.start.history
        assert history is not None
        return history

    @cached_property
    def _steps(self) -> Sequence[OptimizerStep]:
        taken = self.again.taken
        return [*self._history.steps, OptimizerStep(step=taken.step, grads=taken.stepped)]

    @cached_property
    def _settings(self) -> dict[str, dict[str, Any]]:
        """Spec fields that a system may have ignored, by name."""
        spec = self._spec
        if spec.name == "own":
            return {}  # The target's rule need not step params one by one.
        single: dict[str, dict[str, Any]] = {}
        # A system that ignores a setting uses torch's default.
        for option, default in torch_defaults(spec.name).items():
            own = getattr(spec, option)
            if default != own:
                name = f"torch's default {option} {default} in place of {own}"
                single[name] = {option: default}
        if spec.groups:
            single["the same settings for all params in place of groups"] = {"groups": ()}
        if spec.warmup_steps:
            single["a constant lr in place of a warm-up"] = {"warmup_steps": 0}
        # Any combination, with fewer settings first.
        return {
            f"with {', '.join(names)}": changes
            for count in range(1, len(single) + 1)
            for names in combinations(single, count)
            if _is_valid(changes := {k: v for name in names for k, v in single[name].items()}, spec)
        }

    @cached_property
    def _cuts(self) -> dict[str, Cut]:
        """Shards that a system may have stepped separately, by name."""
        # Elementwise optimizers give the same bits on shards.
        name = _WHOLE_PARAM_OPTIMIZERS.get(self._spec.name)
        if name is None:
            return {}
        cuts: dict[str, Cut] = {}
        is_muon, scenario = self._spec.name == "muon", self.again.scenario
        count = scenario.world.size // scenario.system.redundancy
        if is_muon:
            # As a vector, which Muon does not orthogonalise.
            cuts["with no param orthogonalised"] = lambda _, tensor: [tensor.reshape(-1)]
        # Reported ownership gives the true shards; otherwise assume equal shards.
        if spans := self._spans():
            cuts[name] = lambda param, tensor: _cut_at(tensor, spans.get(param, []))
        elif count > 1:
            # Muon needs matrices, so its shards are rows.
            forms = {"rows": torch.atleast_1d} | ({} if is_muon else {"elements": torch.flatten})
            for form, rows in forms.items():
                for how in (torch.chunk, torch.tensor_split):
                    key = f"{name}, {form} dealt out by torch.{how.__name__}"
                    cuts[key] = lambda _, t, how=how, rows=rows: how(rows(t), count)
        # Cuts with the same sizes are equal; keep the first.
        alike = {self._sizes(cut): key for key, cut in reversed(cuts.items())}
        return {key: cuts[key] for key in reversed(alike.values())}

    def _sizes(self, cut: Cut) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(piece.numel() for piece in cut(name, tensor) if piece.numel())
            for name, tensor in self._history.masters.items()
        )

    def _spans(self) -> dict[str, list[tuple[int, int]]]:
        spans: dict[str, list[tuple[int, int]]] = {}
        for held in self.again.holdings:
            for part in held:
                spans.setdefault(part.param, []).append((part.start, part.stop))
        return {name: sorted(found) for name, found in spans.items()}

    def _stepped(self, spec: OptimizerSpec, cut: Cut) -> StepAgain:
        """Return the step from the same gradients; each param is stepped when it is compared."""
        taken, working = self.again.taken, self.again.start.working
        moved = _PerParam(lambda name: self._moved(name, spec, cut))

        def cast(name: str) -> Tensor:
            return working.cast(name, moved[name][0], is_stepped=name in taken.stepped)

        step = replace(
            taken,
            masters=_PerParam(lambda name: moved[name][0]),
            state=_PerParam(lambda name: moved[name][1]),
            params=_PerParam(cast),
        )
        return replace(self.again.by(), finish=lambda by: step)

    def _moved(
        self, name: str, spec: OptimizerSpec, cut: Cut
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return a param's master and optimizer state after all steps."""
        start, on_host = self._history.masters[name], self.again.scenario.system.offload_state
        # Keep the end of the name, because groups match it.
        pieces = {f"{index}.{name}": each for index, each in enumerate(cut(name, start))}
        # On one thread, like the reference.
        with isolated():
            stepper = Stepper(spec, params=pieces, on_host=on_host, rules=self.again.rules)
            for taken in self._steps:
                if name in taken.grads:
                    grads = dict(zip(pieces, cut(name, taken.grads[name]), strict=True))
                    grads = {key: grad.contiguous() for key, grad in grads.items()}
                    stepper.step(grads, factor=lr_factor(spec, step=taken.step))
        # Every piece has its own state. Scalars, such as step counts, are equal.
        states = list(stepper.state().values())
        state = {
            key: _joined([each[key] for each in states], like=start) if value.dim() else value
            for key, value in states[0].items()
        }
        return _joined(list(stepper.masters.values()), like=start), state


class _PerParam(dict[str, Any]):
    """Values by param, each computed on first access."""

    def __init__(self, compute: Callable[[str], Any]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, name: str) -> Any:
        self[name] = value = self._compute(name)
        return value


def _is_valid(changes: Mapping[str, Any], spec: OptimizerSpec) -> bool:
    """Return True if torch accepts these settings."""
    # torch.optim.SGD refuses Nesterov without momentum.
    changed = replace(spec, **changes)
    return not (spec.name == "sgd" and changed.nesterov and not changed.momentum)


def _uncut(_: str, tensor: Tensor) -> Sequence[Tensor]:
    return [tensor]


def _cut_at(tensor: Tensor, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Cut a param into parts: rows if a part consists of whole rows, else flat parts."""
    return list(_parts(tensor, spans)) or [tensor]


def _parts(tensor: Tensor, spans: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    flat = tensor.reshape(-1)
    # Elements per row; 0 if there are no rows.
    row = max(1, tensor.numel() // max(1, tensor.size(0))) if tensor.dim() > 1 else 0
    for start, stop in spans:
        part = flat[start:stop]
        is_rows = row and start % row == 0 and stop % row == 0
        yield part.reshape(-1, *tensor.shape[1:]) if is_rows else part


def _joined(pieces: Sequence[Tensor], *, like: Tensor) -> Tensor:
    return torch.cat([piece.reshape(-1) for piece in pieces]).view_as(like)
