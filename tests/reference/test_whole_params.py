"""Muon and LAMB in the reference: as in their papers, with the bits of the system."""

import pytest
import torch

from zero_sim.reference.stepping import Stepper
from zero_sim.reference.whole_params import newton_schulz
from zero_sim.scenario.spec import OptimizerSpec, ParamGroupSpec
from zero_sim.zero.variants.whole_params import Lamb, Muon, orthogonalized, trust_ratio


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(4, 4), (3, 7), (9, 2), (1, 5), (5, 1)])
def test_newton_schulz_brings_singular_values_near_one(shape):
    """The coefficients give values from 0.68 to 1.14, according to their author."""
    values = torch.linalg.svdvals(newton_schulz(drawn(*shape), eps=1e-8))
    assert values.min() > 0.65
    assert values.max() < 1.2


def test_newton_schulz_keeps_the_singular_vectors():
    matrix = drawn(4, 6)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    made = u.mT @ newton_schulz(matrix, eps=1e-8) @ v.mT
    assert (made - torch.diag(made.diagonal())).abs().max() < 1e-4


def test_muon_moves_a_vector_by_its_momentum():
    spec = OptimizerSpec(name="muon", lr=0.5, momentum=0.75)
    stepper = Stepper(spec, params={"w": torch.zeros(2)})
    stepper.step({"w": torch.tensor([4.0, -8.0])})
    assert stepper.state()["w"]["momentum_buffer"].tolist() == [1.0, -2.0]
    assert stepper.masters["w"].tolist() == [-0.5, 1.0]


def test_muon_scales_a_tall_matrix_by_the_root_of_its_sides():
    spec = OptimizerSpec(name="muon", lr=1.0)
    tall = Stepper(spec, params={"w": torch.zeros(8, 2)})
    tall.step({"w": drawn(8, 2)})
    assert torch.equal(tall.masters["w"], newton_schulz(drawn(8, 2), eps=1e-8) * -2.0)


def test_lamb_step_is_proportional_to_the_param_norm():
    stepper = Stepper(OptimizerSpec(name="lamb", lr=0.1), params={"w": torch.tensor([3.0, 4.0])})
    stepper.step({"w": torch.tensor([7.0, -2.0])})
    moved = stepper.masters["w"] - torch.tensor([3.0, 4.0])
    assert moved.norm().item() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize(("start", "grad"), [(0.0, 1.0), (2.0, 0.0)])
def test_lamb_steps_as_adam_if_a_norm_is_zero(start, grad):
    stepper = Stepper(OptimizerSpec(name="lamb", lr=0.1), params={"w": torch.full((2,), start)})
    stepper.step({"w": torch.full((2,), grad)})
    assert stepper.masters["w"].tolist() == pytest.approx([start - 0.1 * grad] * 2)


SHAPES = [(3, 5), (7,), (2, 3, 4), (0,), (), (6, 2), (0, 3)]


@pytest.mark.parametrize(
    "spec",
    [
        OptimizerSpec(name="muon", momentum=0.9, nesterov=True, weight_decay=0.1),
        OptimizerSpec(name="muon"),
        OptimizerSpec(name="lamb", weight_decay=0.1, betas=(0.5, 0.75)),
    ],
    ids=["muon", "plain-muon", "lamb"],
)
def test_system_has_the_bits_of_the_reference(spec):
    """Both are written from the papers; scenarios compare them over shards."""
    params = {f"p{index}": drawn(*shape, seed=index) for index, shape in enumerate(SHAPES)}
    stepper = Stepper(spec, params=params)
    leaves = [torch.nn.Parameter(param.clone()) for param in params.values()]
    own = {"eps": spec.eps, "weight_decay": spec.weight_decay, "lr": spec.lr}
    if spec.name == "muon":
        system = Muon(leaves, momentum=spec.momentum, nesterov=spec.nesterov, **own)
    else:
        system = Lamb(leaves, betas=spec.betas, **own)
    for step in range(3):
        grads = {n: drawn(*p.shape, seed=10 * step + 50) for n, p in params.items()}
        stepper.step({name: grad.clone() for name, grad in grads.items()})
        for leaf, grad in zip(leaves, grads.values(), strict=True):
            leaf.grad = grad.clone()
        system.step()
    for leaf, (name, master) in zip(leaves, stepper.masters.items(), strict=True):
        assert torch.equal(leaf, master), name
        for key, value in stepper.state()[name].items():
            assert torch.equal(system.state[leaf][key], value)


def test_position_in_a_flat_buffer_does_not_affect_the_bits():
    flat = drawn(64)
    for start in range(5):
        part = flat[start : start + 15]
        assert torch.equal(
            orthogonalized(part.view(3, 5), eps=1e-8),
            orthogonalized(part.clone().view(3, 5), eps=1e-8),
        )
        assert torch.equal(trust_ratio(part, part * 3), trust_ratio(part.clone(), part * 3))


def test_groups_have_their_own_settings():
    groups = (ParamGroupSpec(match="b", lr=0.0),)
    stepper = Stepper(
        OptimizerSpec(name="lamb", lr=0.1, groups=groups),
        params={"a": torch.ones(2), "b": torch.ones(2)},
    )
    stepper.step({"a": torch.ones(2), "b": torch.ones(2)})
    assert stepper.masters["b"].tolist() == [1.0, 1.0]
    assert stepper.masters["a"].tolist() != [1.0, 1.0]
