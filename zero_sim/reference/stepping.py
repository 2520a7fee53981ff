"""The optimizer on whole params: torch's classes, textbook rules or a target's rule, never fused.

Fused kernels treat a tensor's tail differently from its body, so their bits depend on where shards
are cut. A loop over params gives the same bits for every cut.

[Note: foreach]
On the CPU, foreach runs the loop over params, so this module does too. CUDA has separate foreach
kernels. They are also elementwise, but they divide by numbers exactly, whereas the loop multiplies
by a rounded reciprocal. So on CUDA the reference uses foreach kernels if the system does.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_sim.errors import ProtocolError, UntrainableError, UsageError
from zero_sim.reference.own_rule import OwnOptimizer, OwnRule
from zero_sim.reference.rules import Rules
from zero_sim.reference.whole_params import Move, TextbookOptimizer, move_by_lamb, move_by_muon
from zero_sim.scenario.spec import OptimizerName, OptimizerSpec, ParamGroupSpec

_CLASSES: Mapping[str, type[Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
}

# Optimizers that step whole params, written from their papers.
_MOVES: Mapping[str, Move] = {"muon": move_by_muon, "lamb": move_by_lamb}
_BETAS_EPS = ("betas", "eps", "weight_decay")
# Spec fields that each class takes besides `lr`, under the same names.
_OPTIONS: dict[OptimizerName, tuple[str, ...]] = {
    "adamw": (*_BETAS_EPS, "amsgrad"),
    "adam": (*_BETAS_EPS, "amsgrad"),
    "sgd": ("momentum", "nesterov", "weight_decay"),
    "rmsprop": ("momentum", "eps", "weight_decay"),
    "adagrad": ("eps", "weight_decay"),
    "nadam": _BETAS_EPS,
    "radam": _BETAS_EPS,
    "adamax": _BETAS_EPS,
    "adadelta": ("eps", "weight_decay"),
    "asgd": ("weight_decay",),
    "rprop": (),
    "muon": ("momentum", "nesterov", "eps", "weight_decay"),
    "lamb": _BETAS_EPS,
    "own": (*_BETAS_EPS, "momentum", "nesterov", "amsgrad"),
}


def torch_defaults(name: OptimizerName) -> dict[str, Any]:
    """Return the installed torch's defaults by spec field; empty if torch has no such class."""
    cls = _CLASSES.get(name) or getattr(torch.optim, name.capitalize(), None)
    if cls is None:
        return {}
    # From the signature, because defaults differ between torch versions.
    params = inspect.signature(cls).parameters
    return {
        option: params[option].default for option in ("lr", *_OPTIONS[name]) if option in params
    }


def settings_in_words(spec: OptimizerSpec, *, step: int, param: str | None) -> str:
    """Return one step's settings, such as `AdamW lr 0.001 betas (0.9, 0.999) ...`.

    The param's group may override settings. `param` is None for no group.
    """
    options = {"lr": spec.lr} | {option: getattr(spec, option) for option in _OPTIONS[spec.name]}
    group = None if param is None else group_of(spec, name=param)
    # A group's settings override the spec's. Warm-up then scales the rate.
    options |= _group_options(group, takes=options)
    options["lr"] *= lr_factor(spec, step=step)
    cls = _CLASSES.get(spec.name)
    words = [f"{option} {value}" for option, value in options.items()]
    name = "the target's own rule" if spec.name == "own" else spec.name.capitalize()
    return " ".join([cls.__name__ if cls else name, *words])


def lr_factor(spec: OptimizerSpec, *, step: int) -> float:
    """Return the learning-rate factor at a step, counted from 0."""
    # Linear, from 1 / warmup_steps to 1.
    return min(1.0, (step + 1) / spec.warmup_steps) if spec.warmup_steps else 1.0


def group_of(spec: OptimizerSpec, *, name: str) -> ParamGroupSpec | None:
    """Return the first group whose `match` is a suffix of the param's name; None if none is."""
    return next((group for group in spec.groups if name.endswith(group.match)), None)


def build_optimizer(
    spec: OptimizerSpec, *, masters: Mapping[str, Tensor], own: OwnRule | None = None
) -> Optimizer | TextbookOptimizer | OwnOptimizer:
    """Return the spec's optimizer over all `masters`, in the spec's groups."""
    # None collects the params that no group matches.
    members: dict[ParamGroupSpec | None, list[Tensor]] = {}
    for name, master in masters.items():
        members.setdefault(group_of(spec, name=name), []).append(master)
    options: dict[str, Any] = {option: getattr(spec, option) for option in _OPTIONS[spec.name]}
    groups = [
        {"params": tensors, **_group_options(group, takes=options)}
        for group, tensors in members.items()
    ]
    if own is not None or spec.name not in _CLASSES:
        # torch's classes add defaults to groups. Other optimizers need all settings in each group.
        full = [{"lr": spec.lr, **options, **group} for group in groups]
        if own is None and spec.name in _MOVES:
            return TextbookOptimizer(_MOVES[spec.name], full)
        if own is None:
            raise UsageError(
                "expected an update rule of the target with optimizer.name = 'own', got none. "
                "Declare `reference_step` or `reference_optimizer` in the target."
            )
        return OwnOptimizer(own, params=masters, groups=full)
    # See [Note: foreach].
    foreach = spec.foreach and any(master.device.type != "cpu" for master in masters.values())
    return _CLASSES[spec.name](groups, lr=spec.lr, foreach=foreach, **options)  # pyrefly: ignore


def _group_options(
    group: ParamGroupSpec | None, *, takes: Mapping[str, object]
) -> dict[str, float]:
    own: dict[str, float] = {}
    if group is not None and group.lr is not None:
        own["lr"] = group.lr
    # Groups override only settings that the optimizer takes.
    if group is not None and group.weight_decay is not None and "weight_decay" in takes:
        own["weight_decay"] = group.weight_decay
    return own


# Most elements for which each step of a target's rule runs twice, as a check.
_REPEATED_ELEMS_MAX = 1 << 16


class Stepper:
    """The masters and their optimizer."""

    def __init__(
        self,
        spec: OptimizerSpec,
        *,
        params: Mapping[str, Tensor],
        on_host: bool = False,
        rules: Rules | None = None,
    ) -> None:
        """Copy each param, of any dtype and shape, into a master.

        Args:
            spec: Optimizer and its settings; `foreach` has no effect on the CPU.
            params: Initial values by name; at least one param.
            on_host: True to step on the CPU.
            rules: Only the dtype of masters and the target's rule, for optimizer `own`, are used.

        Raises:
            UsageError: There is no rule for optimizer `own`.
            ProtocolError: The target's rule is not usable.
        """
        self._spec, self._on_host, self._rules = spec, on_host, rules or Rules()
        dtype = torch.float32 if self._rules.masters == "fp32" else None
        # Contiguous, as in a system's flat buffers.
        self.masters: dict[str, Tensor] = {
            name: param.detach().to(
                dtype or param.dtype, copy=True, memory_format=torch.contiguous_format
            )
            for name, param in params.items()
        }
        self._stepped = self.masters
        # Systems that offload state round like CPU kernels. So CPU copies are stepped, and written
        # back after each step.
        if on_host:
            self._stepped = {name: master.to("cpu") for name, master in self.masters.items()}
        self._optimizer = build_optimizer(spec, masters=self._stepped, own=self._own)
        # Each step writes a scaled `lr` into the groups, so keep the base rates.
        self._base_lrs = [group["lr"] for group in self._optimizer.param_groups]

    @property
    def _own(self) -> OwnRule | None:
        return self._rules.own

    def step(
        self, grads: Mapping[str, Tensor], *, factor: float = 1.0, repeated: bool = True
    ) -> None:
        """Take one step in place.

        Args:
            grads: fp32 gradients by name, converted to the dtype of their master. A gradient of
                zeros counts. A master without a gradient keeps its value and state.
            factor: Learning-rate factor in this step.
            repeated: True to check that a target's rule gives the same step twice.

        Raises:
            UntrainableError: torch's optimizer raises, because numbers left the range of fp32.
            ProtocolError: The target's rule raises, or gives other bits from the same state.
        """
        # Large steps are not repeated, because that doubles their cost.
        elems = sum(each.numel() for each in grads.values())
        if self._own is None or not repeated or elems > _REPEATED_ELEMS_MAX:
            self._step(grads, factor=factor)
            return
        # A twin from before the step, which must arrive at the same bits.
        start = self.fork()
        self._step(grads, factor=factor)
        start._step(grads, factor=factor)
        self._check_repeated(start)

    def picked(self, name: str, index: Tensor, *, counters: Collection[str]) -> Stepper:
        """Return a copy with some elements of a param, for a target's rule.

        Args:
            name: Param name.
            index: 1D, flattened elements; the copy keeps the number of dimensions.
            counters: As in `values`.
        """
        whole = self._stepped[name]
        # The picked elements become a param of their own.
        params = {name: pick(whole, index)}
        copy = Stepper(self._spec, params=params, on_host=self._on_host, rules=self._rules)
        assert isinstance(copy._optimizer, OwnOptimizer)
        assert isinstance(self._optimizer, OwnOptimizer)

        def cut(key: str, value: Tensor) -> Tensor:
            # State of another shape, or shared by all elements, is copied whole.
            is_whole = value.shape != whole.shape or key in counters
            return value if is_whole else pick(value, index)

        copy._optimizer.take_state(self._optimizer, cut=cut)
        return copy

    def values(self, name: str, *, counters: Collection[str] = ()) -> dict[str, Tensor]:
        """Return a param's state by key, and its master by the empty key; live.

        Args:
            name: Param name.
            counters: State keys shared by all elements. Other state in the param's shape is
                returned flat.
        """
        assert isinstance(self._optimizer, OwnOptimizer)
        held, master = self._optimizer.states()[name], self._stepped[name]
        return {
            key: value if value.shape != master.shape or key in counters else value.reshape(-1)
            for key, value in ({"": master} | dict(held)).items()
        }

    def put(self, name: str, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """Overwrite some elements of a param and its state.

        Args:
            name: Param name.
            index: 1D, flattened elements.
            values: Values of these elements, by key as in `values`.
        """
        # In place, because the optimizer holds these tensors.
        for key, held in self.values(name).items():
            if key in values:
                held[index] = values[key]
        if self._on_host:
            self.masters[name].copy_(self._stepped[name])

    def _check_repeated(self, twin: Stepper) -> None:
        """Check that a copy took the same step."""
        states, again = self.state(), twin.state()
        for name in self.masters:
            keys = states[name].keys() | again[name].keys()
            pairs = {"": (self.masters[name], twin.masters[name])}
            pairs |= {key: (states[name].get(key), again[name].get(key)) for key in keys}
            # State may also be missing on one side.
            for key, (first, second) in pairs.items():
                if first is None or second is None or not _is_same(first, second):
                    assert self._own is not None
                    part = f"state {key!r}" if key else "the value"
                    raise ProtocolError(
                        f"expected {self._own.name} to give the same bits from the same params, "
                        f"gradients and state, got other bits of {part} of param {name!r} from a "
                        "copy. Keep all state in the optimizer's `state` and `param_groups`, as "
                        "its state_dict() has it, not in attributes or globals."
                    )

    def _step(self, grads: Mapping[str, Tensor], *, factor: float) -> None:
        for name, master in self._stepped.items():
            grad = grads.get(name)
            # A copy for foreign code, which may write to it.
            is_copied = self._own is not None
            master.grad = None if grad is None else grad.to(master, copy=is_copied)
        for group, base_lr in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
            # From the base each time, so that factors do not multiply.
            group["lr"] = base_lr * factor
        try:
            self._optimizer.step()
        except (RuntimeError, ArithmeticError) as error:
            raise UntrainableError(
                f"expected settings with which optimizer {self._spec.name!r} can "
                f"take a step, got {type(error).__name__}: {error}. Try a smaller optimizer.lr; "
                "usual values are 1e-4 to 1e-1."
            ) from error
        for name, master in self._stepped.items():
            master.grad = None
            if self._on_host:
                self.masters[name].copy_(master)

    def fork(self) -> Stepper:
        """Return an independent copy."""
        fork = Stepper(self._spec, params=self.masters, on_host=self._on_host, rules=self._rules)
        if isinstance(self._optimizer, OwnOptimizer):
            assert isinstance(fork._optimizer, OwnOptimizer)
            fork._optimizer.take_state(self._optimizer, cut=lambda _, value: value)
            return fork
        assert not isinstance(fork._optimizer, OwnOptimizer)
        for name, master in self._stepped.items():
            fork._optimizer.state[fork._stepped[name]] = {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in self._optimizer.state.get(master, {}).items()
            }
        return fork

    def __deepcopy__(self, memo: object) -> Stepper:
        """Return a fork."""
        # deepcopy of an optimizer loses state that state_dict() does not contain.
        return self.fork()

    def settings(self) -> dict[str, dict[str, object]]:
        """Return each param's group settings, under torch's names, with `lr` before any factor."""
        by_master: dict[Tensor, dict[str, object]] = {}
        for group, base_lr in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
            base_settings = {key: value for key, value in group.items() if key != "params"} | {
                "lr": base_lr
            }
            by_master |= dict.fromkeys(group["params"], base_settings)
        return {name: by_master[master] for name, master in self._stepped.items()}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return all state tensors by param and torch key; live."""
        if isinstance(self._optimizer, OwnOptimizer):
            return {name: dict(held) for name, held in self._optimizer.states().items()}
        state = self._optimizer.state
        return {
            # On the masters' device, wherever the optimizer runs.
            name: {
                key: value.to(self.masters[name].device) if self._on_host else value
                for key, value in state[master].items()
                if isinstance(value, Tensor)
            }
            for name, master in self._stepped.items()
        }


def pick(tensor: Tensor, index: Tensor) -> Tensor:
    """Return some flattened elements of a tensor, keeping its number of dimensions."""
    # [1, ..., 1, index]: rules may treat matrices and vectors differently.
    flat = tensor.reshape(-1)[index.to(tensor.device)]
    return flat.reshape((1,) * (tensor.dim() - 1) + (-1,))


def same_elements(first: Tensor, second: Tensor) -> Tensor:
    """Return True for elements that are equal in two tensors of one dtype; NaN equals NaN."""
    return (first == second) | (first.isnan() & second.isnan())


def _is_same(first: Tensor, second: Tensor) -> bool:
    """Return True if dtype, shape and values are equal; NaN equals NaN."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return bool(same_elements(first, second).all())
