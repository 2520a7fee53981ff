"""State of a run in one layout, recorded as the expected state in another layout.

[Note: the rule of a replayed case]
The reference needs no update rule, because it takes masters and state after each step from the
record. It still computes everything else: losses, reduced gradients, norms and casts.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_sim.reference import OwnRule
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import capabilities_of, has_own_rule
from zero_sim.targets.protocol import OwnedPart, Target

Span = tuple[int, int]
"""Half-open element range of a flattened param."""
Pieces = dict[Span, Tensor]
"""1-D values by range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Params and state after each step of a run."""

    steps: dict[int, dict[str, dict[str, Pieces]]] = field(default_factory=dict)
    """Values by step, param and state key. The master's key is ""."""

    def __deepcopy__(self, memo: object) -> Record:
        """Return itself."""
        # Copying the reference's rule would copy the record, which never changes after its run.
        return self

    def note_parts(self, step: int, parts: Iterable[OwnedPart]) -> None:
        """Record a rank's owned parts after a step."""
        for part in parts:
            place = part.place
            self._note(step, place.param, (place.start, place.stop), part.master, part.state)

    def note_params(self, step: int, params: Mapping[str, Tensor]) -> None:
        """Record working params after a step, if the engine reports no parts."""
        for name, param in params.items():
            self._note(step, name, (0, param.numel()), param, {})

    def _note(
        self, step: int, name: str, span: Span, master: Tensor, state: Mapping[str, Tensor]
    ) -> None:
        keys = self.steps.setdefault(step, {}).setdefault(name, {})
        for key, value in {"": master, **state}.items():
            pieces = keys.setdefault(key, {})
            # The first replica is enough, because the recorded run compares replicas.
            if span not in pieces:
                pieces[span] = value.detach().clone()

    def put(self, step: int, name: str, param: Tensor) -> dict[str, Tensor]:
        """Write recorded values into a whole param, and return its state by key."""
        keys = self.steps.get(step, {}).get(name, {})
        found = {key: _joined(pieces, like=param) for key, pieces in keys.items()}
        if "" in found:
            param.copy_(found.pop(""))
        return found

    def as_list(self) -> list[Any]:
        """Return the record as data for JSON."""
        return [
            (step, name, key, *span, _to_json(value))
            for step, params in self.steps.items()
            for name, keys in params.items()
            for key, pieces in keys.items()
            for span, value in pieces.items()
        ]

    @classmethod
    def from_list(cls, data: Iterable[Any]) -> Record:
        """Return the record that `as_list` returned."""
        record = cls()
        for step, name, key, start, stop, value in data:
            keys = record.steps.setdefault(step, {}).setdefault(name, {})
            keys.setdefault(key, {})[start, stop] = _from_json(value)
        return record


def _joined(pieces: Pieces, *, like: Tensor) -> Tensor:
    """Return state joined from pieces, or a single rank's state if it is not cut like the param."""
    first = next(iter(pieces.values()))
    # False for a step counter, for example, or for Shampoo's factors, which have another shape.
    is_cut = all(
        value.dim() and value.numel() == stop - start for (start, stop), value in pieces.items()
    )
    if not is_cut:
        return first.clone()
    # Elements without an owner stay 0, because the check of ownership reports them.
    whole = first.new_zeros(like.numel())
    for (start, stop), value in pieces.items():
        whole[start:stop] = value.reshape(-1)
    return whole.view(like.shape)


def _to_json(value: Tensor) -> tuple[str, list[int], str]:
    # As bytes, because numpy has no bf16.
    held = value.detach().cpu().contiguous()
    raw = held.reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(held.dtype).removeprefix("torch."), list(held.shape), base64.b64encode(raw).decode()


def _from_json(value: tuple[str, list[int], str]) -> Tensor:
    name, shape, text = value
    # A bytearray is writable, as a tensor's memory must be. frombuffer refuses an empty bytearray.
    raw, dtype = bytearray(base64.b64decode(text)), getattr(torch, name)
    return (
        torch.frombuffer(raw, dtype=dtype).reshape(shape)
        if raw
        else torch.zeros(shape, dtype=dtype)
    )


class _RecordedOptimizer:
    def __init__(self, record: Record, named: Mapping[str, Tensor]) -> None:
        self._record, self._named = record, dict(named)
        # The step counter is in the group, because the reference only copies state and groups.
        self.param_groups: list[dict[str, Any]] = [
            {"params": list(named.values()), "lr": 0.0, "step": 0}
        ]
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    def step(self) -> None:
        (group,) = self.param_groups
        for name, param in self._named.items():
            self.state[param] = self._record.put(group["step"], name, param)
        group["step"] += 1


class _Wrapped:
    def __init__(self, target: Target, record: Record) -> None:
        self._target, self._record = target, record
        self.name = target.name
        # Read before this class adds a rule, because an update rule changes the defaults.
        self.capabilities = capabilities_of(target)

    def __getattr__(self, name: str) -> Any:
        # Optional declarations such as `numerics` come from the target.
        return getattr(self._target, name)

    def build(self, module: Any, **named: Any) -> Any:
        """Build the target's engine."""
        return self._target.build(module, **named)

    def _rule(self, scenario: Scenario, record: Record) -> OwnRule:
        return OwnRule(
            name=f"recorded state of target {self.name!r}",
            scenario=scenario,
            build=lambda named, scenario: _RecordedOptimizer(record, named),
        )


class Recording(_Wrapped):
    """A target whose params and state are recorded by the judge."""

    @property
    def layout_recorder(self) -> Record:
        """Record that the judge fills after each step."""
        return self._record

    def layout_rule(self, scenario: Scenario) -> OwnRule | None:
        """Return a rule that changes nothing if the reference has no other rule, else None."""
        has_rule = scenario.optimizer.name != "own" or has_own_rule(self._target)
        return None if has_rule else self._rule(scenario, Record())


class Replayed(_Wrapped):
    """A target whose params and state must equal the record."""

    def layout_rule(self, scenario: Scenario) -> OwnRule | None:
        """Return the rule that takes each step from the record."""
        return self._rule(scenario, self._record)
