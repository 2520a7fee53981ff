"""The full gradient: norm, zeros, overflow and clipping."""

from __future__ import annotations

import math

import pytest
import torch

from zero_sim.reference.gradient import (
    flatten_wide,
    measure,
    measure_together,
    root_of_squares,
    unflatten,
)
from zero_sim.reference.norms import norm_of_params, norm_of_rows


class TestMeasure:
    """Norm, zeros and finiteness."""

    def test_norm_and_zeros(self):
        """3, 4 and two zeros, one of them negative."""
        measured = measure(torch.tensor([3.0, 0.0, -4.0, -0.0]))
        assert (measured.norm.item(), measured.zeros) == (5.0, 2)
        assert measured.norm.dtype == torch.float32
        assert measured.norm.shape == ()
        assert measured.norm_certified
        assert measured.finite

    def test_squares_that_fp32_cannot_hold(self):
        """1e30 squared overflows fp32, and 1e-30 squared underflows."""
        huge, tiny = (measure(torch.full((4,), value)) for value in (1e30, 1e-30))
        assert huge.norm.item() == torch.tensor(2e30).item()
        assert tiny.norm.item() == torch.tensor(2e-30).item()
        assert huge.finite

    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    def test_overflow(self, bad):
        """An infinite or NaN element makes the norm so, in every order."""
        measured = measure(torch.tensor([1.0, bad]))
        assert not measured.finite
        assert not measured.norm.isfinite()
        assert measured.norm_certified

    def test_empty_gradient_has_norm_zero(self):
        measured = measure(torch.empty(0))
        assert (measured.norm.item(), measured.zeros, measured.finite) == (0.0, 0, True)


class TestCertificate:
    """Sums near the middle of two fp32 values, which depend on the order."""

    def test_middle_is_not_certified(self):
        """1 + 2^-24 is midway between 1 and the next fp32 value; its square fits fp64."""
        middle = 1 + 2.0**-24
        assert not root_of_squares(middle * middle, terms=2)[1]

    @pytest.mark.parametrize("norm", [1.0, 5.0, 0.0])
    def test_fp32_values_are_certified(self, norm):
        """fp32 values are as far from every middle as possible."""
        got, certified = root_of_squares(norm * norm, terms=1000)
        assert (got.item(), certified) == (norm, True)

    def test_more_terms_widen_the_uncertified_range(self):
        """2^-40 from the middle: certified for few terms, not for 2^14."""
        near = (1 + 2.0**-24 - 2.0**-40) ** 2
        assert root_of_squares(near, terms=16)[1]
        assert not root_of_squares(near, terms=1 << 14)[1]


class TestFlat:
    """Conversion to one flat tensor and back."""

    def test_round_trip_of_shapes_and_dtypes(self):
        """Strided, empty and scalar gradients keep the requested order."""
        grads = {
            "a": torch.arange(6.0).view(2, 3).T,
            "b": torch.tensor(7.0, dtype=torch.bfloat16),
            "c": torch.empty(0, 4),
        }
        flat = flatten_wide(grads, names=["b", "a", "c"])
        assert flat.tolist() == [7, 0, 3, 1, 4, 2, 5]
        like = {name: grads[name] for name in ("b", "a", "c")}
        for name, piece in unflatten(flat, like=like).items():
            assert torch.equal(piece, grads[name].float())

    def test_a_single_gradient_is_copied(self):
        """The reduced gradient stays intact when the flat one is divided."""
        grad = torch.ones(2)
        flatten_wide({"a": grad}, names=["a"]).div_(2)
        assert grad.tolist() == [1.0, 1.0]

    def test_no_names(self):
        """All params may be frozen."""
        assert flatten_wide({}, names=[]).shape == (0,)


SHAPES = {"w": (7, 9), "b": (9,), "scalar": (), "empty": (0, 3), "large": (61, 53)}


class TestOfParams:
    """Norms and clipping as in torch for unsharded gradients, at any address."""

    @pytest.fixture
    def grads(self):
        """Return a flat tensor, its views, and copies of the views."""
        generator = torch.Generator().manual_seed(3)
        flat = torch.randn(sum(math.prod(shape) for shape in SHAPES.values()), generator=generator)
        views = unflatten(flat, like={name: torch.empty(shape) for name, shape in SHAPES.items()})
        return flat, views, [view.clone() for view in views.values()]

    def test_norm_equals_torch(self, grads):
        _, views, copies = grads
        assert torch.equal(norm_of_params(views.values()), torch.nn.utils.get_total_norm(copies))

    @pytest.mark.parametrize("rank_count", [1, 2, 3, 8])
    def test_norm_of_rows_is_within_fp32_rounding(self, grads, rank_count):
        """Each rounding is off by less than a unit in the last place."""
        copies = [grad for grad in grads[2] if grad.dim()]
        norm = norm_of_rows(copies, rank_count=rank_count, order="linear")
        exact = torch.nn.utils.get_total_norm([copy.double() for copy in copies])
        terms = sum(copy.numel() for copy in copies) + rank_count + len(copies)
        assert abs(norm.double() - exact) <= terms * 2.0**-23 * exact

    def test_norm_of_rows_equals_norm_of_params_if_exact(self):
        grads = [torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])]
        assert norm_of_rows(grads, rank_count=1, order="linear").item() == 13.0
        assert norm_of_rows(grads, rank_count=4, order="tree").item() == 13.0

    @pytest.mark.parametrize("rank_count", [1, 2, 3])
    def test_scalars_count_once_in_norm_of_rows(self, rank_count):
        """A scalar is a row that each rank has; empty gradients add nothing."""
        grads = [torch.tensor(3.0), torch.tensor([4.0, 12.0]), torch.empty(0), torch.empty(0, 3)]
        assert norm_of_rows(grads, rank_count=rank_count, order="linear").item() == 13.0

    def test_norm_without_gradients_is_zero(self):
        assert norm_of_params([]).item() == 0.0


def test_single_part_is_not_measured_again():
    """Its norm may differ from the root of the sum of its squares."""
    measured = measure(torch.tensor([3.0, 4.0]))
    assert measure_together([measured]) is measured
