"""Clipping by norm in each form, bit for bit."""

import math
from dataclasses import replace

import pytest
import torch

from zero_sim.reference.clipping import (
    CLIP_FORMS,
    clip_by_norm_,
    clip_factor,
    clip_is_certified,
)
from zero_sim.reference.gradient import measure, root_of_squares, squares_within_reach


class TestClip:
    """min(1, bound / (norm + 1e-6)) in fp32."""

    def test_half(self):
        """5e4 + 1e-6 is 5e4 in fp32, so the coefficient is exactly 1/2."""
        flat = torch.tensor([3e4, 4e4])
        clip_by_norm_(flat, norm=torch.tensor(5e4), norm_max=2.5e4)
        assert flat.tolist() == [1.5e4, 2e4]

    def test_never_scales_up(self):
        flat = torch.tensor([3.0, 4.0])
        clip_by_norm_(flat, norm=torch.tensor(5.0), norm_max=6.0)
        assert flat.tolist() == [3.0, 4.0]

    def test_coefficient_is_a_true_quotient(self):
        """For a norm of 3000, the product with the rounded reciprocal differs from the quotient."""
        for bound in range(1, 300):
            flat, norm = torch.ones(1), torch.tensor(3e3)
            clip_by_norm_(flat, norm=norm, norm_max=float(bound))
            assert flat.item() == torch.tensor(bound / 3e3, dtype=torch.float64).float().item()


@pytest.mark.parametrize("norm_max", [1e-3, 0.3, 1e6])
def test_reciprocal_form_equals_torch(norm_max):
    grad = torch.randn(57, 31, generator=torch.Generator().manual_seed(3))
    flat, param = grad.reshape(-1).clone(), torch.nn.Parameter(torch.empty_like(grad))
    param.grad = grad
    norm = torch.nn.utils.clip_grad_norm_([param], norm_max)
    clip_by_norm_(flat, norm=norm, norm_max=norm_max, form="fp32-reciprocal")
    assert torch.equal(flat, param.grad.reshape(-1))


@pytest.mark.parametrize("form", CLIP_FORMS)
def test_forms_differ_only_by_rounding(form):
    norm, norm_max = torch.tensor(0.7), 0.03
    factor = clip_factor(norm, norm_max=norm_max, form=form, root=norm.item()).item()
    eps = 0.0 if form.endswith("without-eps") else 1e-6
    wanted = norm_max / (norm.item() + eps)
    got = 1 / factor if "quotient" in form else factor
    assert math.isclose(got, wanted, rel_tol=4 * 2.0**-23)


@pytest.mark.parametrize("form", CLIP_FORMS)
def test_no_form_scales_up(form):
    for value in (0.0, 0.5, 1.0 - 2.0**-20):
        assert clip_factor(torch.tensor(value), norm_max=1.1, form=form, root=value).item() == 1.0


def test_root_form_is_certified_by_its_factor():
    """The norm is midway between two fp32 numbers; both give the same factor."""
    squares = (1 + 2.0**-24) ** 2
    norm, certified = root_of_squares(squares, terms=2)
    measured = measure(torch.tensor([1.0, 0.0]))
    middle = replace(measured, squares=squares, norm=norm, norm_certified=certified)
    assert not clip_is_certified(middle, norm_max=0.5, form="fp32-division")
    assert clip_is_certified(middle, norm_max=0.5, form="fp64-root-division")


def test_factor_that_depends_on_the_order_is_not_certified():
    """The bound puts the quotient midway between two fp32 numbers."""
    measured = measure(torch.tensor([3.0, 4.0]))
    low, high = squares_within_reach(measured.squares, terms=measured.terms)
    norm_max = (0.5 + 2.0**-25) * (5.0 + 1e-6)
    ends = [
        clip_factor(
            measured.norm, norm_max=norm_max, form="fp64-root-division", root=squares**0.5
        ).item()
        for squares in (low, high)
    ]
    assert ends[0] != ends[1]
    assert not clip_is_certified(measured, norm_max=norm_max, form="fp64-root-division")
    assert clip_is_certified(measured, norm_max=norm_max, form="fp64-division")
