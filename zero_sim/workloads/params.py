"""`params`: bare params with any shapes, including scalars and params without elements.

The loss adds `c * p * p / 2 + d * p` over all params, with random `c` and `d`. Its gradient,
`c * p + d`, depends on param, step, rank and micro-batch, so stale or misplaced values show. A
param with a second name occurs in two terms. A param that some micro-batches omit gets no gradient
from them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from zero_sim.scenario.bare_params import bare_names, skipped_at, unread_by
from zero_sim.scenario.spec import ModelSpec, Scenario
from zero_sim.workloads.draws import (
    batch_generator,
    plant_nan,
    rows_of,
    weight_generator,
    working_dtype,
)
from zero_sim.workloads.protocol import Batch, share_of


class BareParams(nn.Module):
    """Params `p0`, `p1`, ... and nothing else; forward is the loss itself.

    A module `again` contains tied params: `again.p0` is the same param as `p0`. If nested, `p0` is
    `m0.p0`, and `again` is a sibling of `m0`.
    """

    def __init__(self, bits: tuple[Tensor, ...], *, model: ModelSpec) -> None:
        super().__init__()
        params = {f"p{index}": nn.Parameter(initial.clone()) for index, initial in enumerate(bits)}
        self._elems = {name: param.numel() for name, param in params.items()}
        self._nested, self._tied_first = model.nested, model.tied_first
        self._tied = frozenset(model.tied)
        for index, (name, param) in enumerate(params.items()):
            if model.nested:
                self.add_module(f"m{index}", SomeParams({name: param}))
            else:
                self.register_parameter(name, param)
        # The same param objects, under second names.
        if model.tied:
            self.again = SomeParams({name: params[name] for name in model.tied})

    def forward(
        self,
        factors: Tensor,
        *,
        unread: Collection[str] = (),
        skipped: Collection[str] = (),
    ) -> Tensor:
        """Return the 0-D loss.

        Args:
            factors: (2, elements): `c` and `d` for all params in order, then for second names.
            unread: Params to omit.
            skipped: Params in `unread` whose own modules are not called.
        """
        # Factors for first names, then for second names.
        first, second = factors.tensor_split([sum(self._elems.values())], dim=1)
        terms: list[Tensor] = []
        # The order decides which use of a tied param comes first in backward.
        if self._tied_first:
            terms += self._second_terms(second, unread=unread, skipped=skipped)
        if self._nested:
            parts = first.split(list(self._elems.values()), dim=1)
            for index, (name, part) in enumerate(zip(self._elems, parts, strict=True)):
                # An omitted call triggers none of the module's hooks.
                if name not in skipped:
                    terms.append(self.get_submodule(f"m{index}")(part, unread=unread))
        else:
            terms.append(_add_terms(self, self._elems, first, unread=unread))
        if not self._tied_first:
            terms += self._second_terms(second, unread=unread, skipped=skipped)
        # A plain chain, in a fixed order.
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total

    def _second_terms(
        self, factors: Tensor, *, unread: Collection[str], skipped: Collection[str]
    ) -> list[Tensor]:
        """Return the second names' terms; none if all are skipped."""
        is_called = not self._tied <= set(skipped)
        return [self.again(factors, unread=unread)] if is_called else []


class SomeParams(nn.Module):
    """Some params; forward is their part of the loss. Tied params occur here again."""

    def __init__(self, params: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self._elems = {name: param.numel() for name, param in params.items()}
        for name, param in params.items():
            self.register_parameter(name, param)

    def forward(self, factors: Tensor, *, unread: Collection[str] = ()) -> Tensor:
        """Return the 0-D sum; arguments as for `BareParams.forward`, but only for these params."""
        return _add_terms(self, self._elems, factors, unread=unread)


def _add_terms(
    module: nn.Module, elems: Mapping[str, int], factors: Tensor, *, unread: Collection[str]
) -> Tensor:
    """Return the sum of the terms of a module's own params.

    Args:
        module: The module.
        elems: Number of elements of each param, by name.
        factors: (2, elements) of all of them.
        unread: Names of params to omit.
    """
    total = factors.new_zeros(())
    # Rows `c` and `d`, split by param.
    square, linear = (row.split(list(elems.values())) for row in factors)
    for name, c, d in zip(elems, square, linear, strict=True):
        if name in unread:
            continue
        # By name, because a wrapper may replace the param by a plain tensor.
        flat = getattr(module, name).reshape(-1)
        total = total + ((0.5 * c * flat + d) * flat).sum()
    return total


class ParamsWorkload:
    """Bare params with a quadratic loss."""

    def __init__(self, scenario: Scenario) -> None:
        """Draw the initial params, N(0, 1), once.

        Args:
            scenario: Uses `model`, `data` and `run.seed`. A micro-batch's rows share their factors,
                so only their number matters. Without shapes the module has no params, and trainers
                must refuse it.
        """
        self._scenario = scenario
        self._dtype = working_dtype(scenario.model.dtype)
        shapes = scenario.model.shapes or ()
        generator = weight_generator(scenario)
        self._bits = tuple(
            torch.randn(shape, generator=generator).to(self._dtype) for shape in shapes
        )
        named = dict(zip(bare_names(scenario.model), shapes, strict=True))
        # Second names have their own factors.
        placed = (*shapes, *(named[name] for name in scenario.model.tied))
        self._elems = sum(math.prod(shape) for shape in placed)

    def build(self) -> nn.Module:
        """Return a fresh `BareParams`."""
        return BareParams(self._bits, model=self._scenario.model)

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        """Return `inputs` (2, elements): the factors `c` and `d`, N(0, 1); no targets."""
        generator = batch_generator(self._scenario, step=step, rank=rank, micro=micro)
        factors = torch.randn((2, self._elems), generator=generator).to(self._dtype)
        plant_nan(factors, scenario=self._scenario, step=step, rank=rank, micro=micro)
        rows = rows_of(self._scenario, step=step, rank=rank)
        # Every micro-batch in the step omits skipped params.
        skipped = skipped_at(self._scenario.model, step=step)
        unread = unread_by(self._scenario.model, rank=rank, micro=micro) | skipped
        return Batch(inputs=factors, targets=None, row_count=rows, unread=unread, skipped=skipped)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the module's output, 0-D fp32: a mean or a sum over rows."""
        # Extra arguments only if needed, because a system's wrapper may not take them.
        named = {"unread": batch.unread, "skipped": batch.skipped} if batch.unread else {}
        loss = module(batch.inputs, **named).float()
        if self._scenario.data.loss == "sum":
            return loss * batch.rows
        return share_of(loss, scenario=self._scenario)

    def accuracy(self, module: nn.Module) -> float | None:
        """Return None, because nothing is classified."""
        return None
