"""The whole gradient: norm, zeros, overflow and clipping."""

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
    """What the judge is told of it."""

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

    def test_nothing_at_all(self):
        """Without elements the norm is 0."""
        measured = measure(torch.empty(0))
        assert (measured.norm.item(), measured.zeros, measured.finite) == (0.0, 0, True)


class TestCertificate:
    """Next to the middle of two fp32 values, the order of a sum decides."""

    def test_the_middle_is_not_certified(self):
        """1 + 2^-24 lies between 1 and the next fp32 value; its square fits fp64."""
        middle = 1 + 2.0**-24
        assert not root_of_squares(middle * middle, terms=2)[1]

    @pytest.mark.parametrize("norm", [1.0, 5.0, 0.0])
    def test_fp32_values_are_certified(self, norm):
        """They are as far from every middle as can be."""
        got, certified = root_of_squares(norm * norm, terms=1000)
        assert (got.item(), certified) == (norm, True)

    def test_more_terms_reach_further(self):
        """2^-40 from the middle: certified for a few terms, not for 2^14 of them."""
        near = (1 + 2.0**-24 - 2.0**-40) ** 2
        assert root_of_squares(near, terms=16)[1]
        assert not root_of_squares(near, terms=1 << 14)[1]


class TestFlat:
    """To one tensor and back."""

    def test_round_trip_of_shapes_and_dtypes(self):
        """Strides, empty and scalar ones included, in the order asked for."""
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
        """Everything may be frozen."""
        assert flatten_wide({}, names=[]).shape == (0,)


SHAPES = {"w": (7, 9), "b": (9,), "scalar": (), "empty": (0, 3), "large": (61, 53)}


class TestOfParams:
    """Norm and clipping as torch has them for whole gradients, wherever in memory they lie."""

    @pytest.fixture
    def grads(self):
        """Views of one tensor, and copies of them that are tensors of their own."""
        generator = torch.Generator().manual_seed(3)
        flat = torch.randn(sum(math.prod(shape) for shape in SHAPES.values()), generator=generator)
        views = unflatten(flat, like={name: torch.empty(shape) for name, shape in SHAPES.items()})
        return flat, views, [view.clone() for view in views.values()]

    def test_the_norm_is_that_of_torch(self, grads):
        _, views, copies = grads
        assert torch.equal(norm_of_params(views.values()), torch.nn.utils.get_total_norm(copies))

    @pytest.mark.parametrize("rank_count", [1, 2, 3, 8])
    def test_of_rows_it_is_as_near_as_fp32_lets_it_be(self, grads, rank_count):
        """Each of a handful of roundings is off by less than a unit in the last place."""
        copies = [grad for grad in grads[2] if grad.dim()]
        norm = norm_of_rows(copies, rank_count=rank_count, order="linear")
        exact = torch.nn.utils.get_total_norm([copy.double() for copy in copies])
        terms = sum(copy.numel() for copy in copies) + rank_count + len(copies)
        assert abs(norm.double() - exact) <= terms * 2.0**-23 * exact

    def test_of_one_ranks_rows_it_is_that_of_whole_params(self):
        grads = [torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])]
        assert norm_of_rows(grads, rank_count=1, order="linear").item() == 13.0
        assert norm_of_rows(grads, rank_count=4, order="tree").item() == 13.0

    @pytest.mark.parametrize("rank_count", [1, 2, 3])
    def test_what_has_no_rows_counts_once(self, rank_count):
        """A scalar is a row by itself, as each rank has it; what is empty adds nothing."""
        grads = [torch.tensor(3.0), torch.tensor([4.0, 12.0]), torch.empty(0), torch.empty(0, 3)]
        assert norm_of_rows(grads, rank_count=rank_count, order="linear").item() == 13.0

    def test_without_gradients_it_is_zero(self):
        assert norm_of_params([]).item() == 0.0


def test_one_part_is_measured_as_it_is():
    """Its norm may be another one than the root of the sum of its squares."""
    measured = measure(torch.tensor([3.0, 4.0]))
    assert measure_together([measured]) is measured
