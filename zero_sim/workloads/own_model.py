"""`own:NAME`: a target's own model, data and loss.

A scenario only contains the name and imports nothing. `make_known` registers the model when its
target is judged. Systems and the reference each build it, so its functions must be pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from zero_sim.errors import UsageError
from zero_sim.scenario.spec import OwnModelName, Scenario
from zero_sim.workloads.draws import (
    batch_generator,
    generator_of,
    named_seed,
    plant_nan,
    rows_of,
    working_dtype,
)
from zero_sim.workloads.protocol import Batch, total_loss

# Models whose check is remembered.
_CHECKED_MAX = 64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnModel:
    """A target's own model, an entry in `Target.models`.

    Its functions must be pure, because system and reference call them in any order and need equal
    bits from equal arguments.

        OwnModel(
            build=lambda: nn.Linear(3, 2),
            batch=lambda generator, rows: (torch.randn(rows, 3, generator=generator),),
            loss=lambda module, x: module(x).square().mean(),
        )
    """

    build: Callable[[], nn.Module]
    """Builds a fresh module. torch's global generator is seeded before each call, so default
    initialisation works. The module is trained as built, in fp32, or cast to `model.dtype`."""
    batch: Callable[[torch.Generator, int], tuple[Tensor, ...] | Tensor]
    """Draws a micro-batch, given a generator and the number of rows."""
    loss: Callable[..., Tensor | tuple[Tensor, Tensor]]
    """Returns the 0-D loss, a mean over rows, given the module and a micro-batch's tensors. It may
    also return a second term, which systems may scale separately (`Numerics.scale_second`). It may
    only call the module, because a system may wrap it."""


# Filled by targets, because a scenario imports nothing.
_KNOWN: dict[OwnModelName, OwnModel] = {}


def make_known(models: Mapping[OwnModelName, OwnModel]) -> None:
    """Register models by name, replacing earlier models with equal names."""
    _KNOWN.update(models)


@contextmanager
def known_while(models: Mapping[OwnModelName, OwnModel]) -> Iterator[None]:
    """Register models for a while, so that no fuzzer draws them afterwards."""
    make_known(models)
    try:
        yield
    finally:
        for name in models:
            del _KNOWN[name]


def known_models() -> tuple[OwnModelName, ...]:
    """Return the names of all registered models."""
    return tuple(_KNOWN)


def own_model(name: OwnModelName) -> OwnModel:
    """Return a registered model.

    Raises:
        UsageError: No target has registered it.
    """
    if name not in _KNOWN:
        raise UsageError(
            f"expected a target whose `models` contains {name!r}, got none. Pass "
            "--target module:name with the target that has it."
        )
    return _KNOWN[name]


class OwnWorkload:
    """Workload for a target's own model."""

    def __init__(self, scenario: Scenario, own: OwnModel) -> None:
        """Build a first module, with which all others are compared.

        Args:
            scenario: Uses `model.name`, `model.dtype`, `data` and `run.seed`.
            own: The model.

        Raises:
            UsageError: A model function raises, is not pure, or returns an unexpected type.
        """
        self._scenario = scenario
        self._own = own
        self._name = f"model {scenario.model.name!r}"
        self._dtype = working_dtype(scenario.model.dtype)
        self._seed = named_seed(scenario.run.seed, "weights")
        self._first = self._made()
        # Checked once per model and dtype: a workload is built for each case.
        _check_functions(own, self._name, self._dtype)

    def _made(self) -> nn.Module:
        return _build(self._own, self._name, dtype=self._dtype, seed=self._seed)

    def build(self) -> nn.Module:
        """Return a fresh module.

        Raises:
            UsageError: It differs from the first module.
        """
        module = self._made()
        # System and reference must start from equal bits.
        if differs := _difference(self._first, module):
            raise UsageError(
                f"expected `build` of {self._name} to make a fresh, equal module in each call, got "
                f"{differs}. Draw from torch's global generator, which is seeded before each call."
            )
        return module

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        """Return the tensors as `inputs` and `extra`, with floating tensors in the working dtype.

        If no tensor is floating, `targets` is a loss factor of 1, which can hold a planted NaN.
        """
        scenario = self._scenario
        generator = batch_generator(scenario, step=step, rank=rank, micro=micro)
        rows = rows_of(scenario, step=step, rank=rank)
        tensors = _draw(self._own, self._name, generator, rows=rows, dtype=self._dtype)
        # The first floating tensor can hold a planted NaN.
        floating = [each for each in tensors if each.is_floating_point()]
        factor = None if floating else torch.ones(1)
        poisoned = floating[0] if factor is None else factor
        plant_nan(poisoned, scenario=scenario, step=step, rank=rank, micro=micro)
        return Batch(inputs=tensors[0], targets=factor, extra=tensors[1:], row_count=rows)

    def terms(self, module: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
        """Return the model's loss, or its two terms, in fp32."""
        terms = [
            each.float() for each in _terms(self._own.loss(module, batch.inputs, *batch.extra))
        ]
        # The factor is 1, unless a NaN is planted.
        if batch.targets is not None:
            terms[0] = terms[0] * batch.targets.squeeze()
        return tuple(terms)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the model's fp32 loss, the sum of its terms."""
        return total_loss(self.terms(module, batch))

    def accuracy(self, module: nn.Module) -> float | None:
        """Return None: nothing is held out."""
        return None


@contextmanager
def _theirs(expected: str) -> Iterator[None]:
    """Attribute an exception to the function that raised it."""
    try:
        yield
    # It already names its function.
    except UsageError:
        raise
    # Users' functions may raise anything.
    except Exception as error:
        raise UsageError(f"expected {expected}, got {type(error).__name__}: {error}.") from error


def _build(own: OwnModel, name: str, *, dtype: torch.dtype, seed: int) -> nn.Module:
    """Build a module from the seed, and restore the global generator."""
    # Restored below: the caller's random numbers must not depend on this build.
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        with _theirs(f"`build` of {name} to make a module"):
            module: object = own.build()
    finally:
        torch.default_generator.set_state(state)
    if not isinstance(module, nn.Module):
        raise UsageError(f"expected `build` of {name} to return an nn.Module, got {module!r}.")
    return module if dtype is torch.float32 else module.to(dtype)


def _draw(
    own: OwnModel, name: str, generator: torch.Generator, *, rows: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    with _theirs(f"`batch` of {name} to draw tensors"):
        drawn: object = own.batch(generator, rows)
    tensors = (drawn,) if isinstance(drawn, Tensor) else drawn
    if not isinstance(tensors, tuple) or not tensors:
        raise UsageError(f"expected `batch` of {name} to return a tuple of tensors, got {drawn!r}.")
    cast: list[Tensor] = []
    for each in tensors:
        if not isinstance(each, Tensor):
            raise UsageError(f"expected `batch` of {name} to return tensors, got {each!r}.")
        # A copy, because a system may overwrite its inputs.
        cast.append(each.to(dtype if each.is_floating_point() else each.dtype, copy=True))
    return tuple(cast)


def _terms(loss: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return loss if isinstance(loss, tuple) else (loss,)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return params and buffers, with tied params under each name."""
    return dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers()))


def _difference(first: nn.Module, other: nn.Module) -> str:
    """Describe why a module is not a fresh, equal copy; empty if it is."""
    if first is other:
        return "the same module again"
    before, now = _tensors(first), _tensors(other)
    if list(before) != list(now):
        names = ", ".join(sorted(before.keys() ^ now.keys())) or "those in another order"
        return f"other params or buffers: {names}"
    # Shared memory would let one rank's training change the others.
    memory = {each.untyped_storage().data_ptr() for each in before.values() if each.numel()}
    for name, tensor in now.items():
        like = before[name]
        if (like.shape, like.dtype, like.requires_grad) != (
            tensor.shape, tensor.dtype, tensor.requires_grad
        ):  # fmt: skip
            return f"{name!r} of another shape, dtype or requires_grad"
        if tensor.untyped_storage().data_ptr() in memory:
            return f"{name!r} in the memory of an earlier module"
        if not torch.equal(like, tensor):
            return f"other bits of {name!r}"
    return ""


def _is_loss(each: object) -> bool:
    return isinstance(each, Tensor) and each.shape == () and each.requires_grad


@lru_cache(maxsize=_CHECKED_MAX)
def _check_functions(own: OwnModel, name: str, dtype: torch.dtype) -> None:
    """Check on two rows that `batch` and `loss` are pure, and that `loss` returns a loss."""
    module = _build(own, name, dtype=dtype, seed=0)
    # Equal generators must give equal draws.
    one, two = (_draw(own, name, generator_of(0), rows=2, dtype=dtype) for _ in range(2))
    if len(one) != len(two) or not all(map(torch.equal, one, two)):
        raise UsageError(
            f"expected `batch` of {name} to draw the same tensors from equal generators, got "
            "others. Pass `generator=generator` to every function that draws."
        )
    buffers = {name: each.clone() for name, each in module.named_buffers()}
    state = torch.default_generator.get_state()
    losses: list[tuple[Tensor, ...]] = []
    try:
        for _ in range(2):
            # Seeded, because the loss may draw from torch's global generator.
            torch.default_generator.manual_seed(0)
            with _theirs(f"`loss` of {name} to compute a loss"):
                losses.append(_terms(own.loss(module, *one)))
    finally:
        torch.default_generator.set_state(state)
    terms = losses[0]
    # A loss is 0-D and requires a gradient.
    wrong = [each for each in terms if not _is_loss(each)]
    if wrong or len(terms) not in (1, 2):
        raise UsageError(
            f"expected `loss` of {name} to return a 0-D tensor that requires grad, or two, got "
            f"{wrong[0] if wrong else terms!r}."
        )
    # With running statistics, results would depend on the order of replays.
    changed = [name for name, each in module.named_buffers() if not each.equal(buffers[name])]
    if changed:
        raise UsageError(
            f"expected the forward of {name} to leave buffers unchanged, because the reference "
            f"replays all ranks on one module, got other values of {changed[0]!r}. Use a layer "
            "without running statistics."
        )
    one_loss, other = map(total_loss, losses)
    if not torch.equal(one_loss, other):
        raise UsageError(
            f"expected `loss` of {name} to be a function of its arguments, got {one_loss:.9g} and "
            f"{other:.9g} for equal ones. Draw random numbers only from torch's global generator."
        )
