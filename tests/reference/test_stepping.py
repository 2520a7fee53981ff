"""The optimizer step, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from zero_sim.reference.adding import add_ranks
from zero_sim.reference.stepping import Stepper, divide_local, master_gradient
from zero_sim.scenario.spec import OptimizerSpec
from zero_sim.workloads import transformer as walkthrough


class TestDivision:
    """When and how the sum becomes a mean."""

    def test_none_divides_nothing(self):
        """The sum is the optimizer's gradient."""
        grad = torch.tensor([3.0])
        assert divide_local(grad, divide="none", world_size=3).item() == 3.0
        assert master_gradient(grad, divide="none", world_size=3).item() == 3.0

    def test_pre_divides_in_the_gradients_dtype(self):
        """1/3 rounded to bf16, and not divided again."""
        grad = torch.tensor([1.0], dtype=torch.bfloat16)
        third = divide_local(grad, divide="pre", world_size=3)
        assert third.item() == 0.333984375
        assert master_gradient(third, divide="pre", world_size=3).item() == 0.333984375

    def test_post_divides_in_fp32(self):
        """A bf16 sum is widened first."""
        grad = torch.tensor([1.0], dtype=torch.bfloat16)
        assert divide_local(grad, divide="post", world_size=3) is grad
        third = master_gradient(grad, divide="post", world_size=3)
        assert third.item() == torch.tensor(1 / 3, dtype=torch.float64).float().item()

    @pytest.mark.parametrize("world_size", [3, 5, 6, 7, 13, 15])
    def test_division_is_true_division(self, world_size):
        """Every quotient is the correctly rounded one; a rounded reciprocal's products are not."""
        values = torch.arange(1, 4000, dtype=torch.float32)
        exact = (values.double() / world_size).float()
        assert torch.equal(master_gradient(values, divide="post", world_size=world_size), exact)
        assert torch.equal(divide_local(values, divide="pre", world_size=world_size), exact)

    def test_reduced_gradient_stays_intact(self):
        """The optimizer gets a copy, also where nothing is to be cast."""
        grad = torch.tensor([3.0])
        master_gradient(grad, divide="post", world_size=3).fill_(9.0)
        assert grad.item() == 3.0


class TestSgd:
    """Dyadic numbers, so that every value is exact."""

    def test_momentum_accumulates(self):
        """w = 1, lr = momentum = 1/2, gradient 1 twice: buffer 1, 3/2; w 1/2, -1/4."""
        spec = OptimizerSpec(name="sgd", lr=0.5, momentum=0.5)
        stepper = Stepper(spec, params={"w": torch.tensor([1.0])})
        seen = []
        for _ in range(2):
            stepper.step({"w": torch.tensor([1.0])})
            seen.append(
                (stepper.masters["w"].item(), stepper.state()["w"]["momentum_buffer"].item())
            )
        assert seen == [(0.5, 1.0), (-0.25, 1.5)]

    def test_momentum_leaves_the_gradient_alone(self):
        """The buffer is torch's own tensor, not the one handed in."""
        spec = OptimizerSpec(name="sgd", lr=0.5, momentum=0.5)
        stepper = Stepper(spec, params={"w": torch.tensor([1.0])})
        grad = torch.tensor([1.0])
        stepper.step({"w": grad})
        stepper.step({"w": torch.tensor([1.0])})
        assert grad.item() == 1.0

    def test_weight_decay_pulls_also_without_a_gradient(self):
        """A zero gradient counts: w - lr * decay * w."""
        spec = OptimizerSpec(name="sgd", lr=0.5, weight_decay=0.5)
        stepper = Stepper(spec, params={"w": torch.tensor([4.0])})
        stepper.step({"w": torch.zeros(1)})
        assert stepper.masters["w"].item() == 3.0

    def test_plain_sgd_keeps_no_state_tensors(self):
        """Nothing to compare where there is no momentum."""
        stepper = Stepper(OptimizerSpec(name="sgd"), params={"w": torch.ones(1)})
        stepper.step({"w": torch.ones(1)})
        assert stepper.state() == {"w": {}}


class TestAdam:
    """The first step has a closed form: w - lr * g / (|g| + eps)."""

    @pytest.mark.parametrize("grad", [3.0, -0.5, 1e-8])
    def test_first_step(self, grad):
        """Moments (1 - beta) * g and (1 - beta2) * g^2; bias correction undoes the betas."""
        spec = OptimizerSpec(name="adam", lr=0.1, betas=(0.8, 0.9), eps=1e-8)
        stepper = Stepper(spec, params={"w": torch.tensor([1.0])})
        stepper.step({"w": torch.tensor([grad])})
        state = stepper.state()["w"]
        expected = 1.0 - 0.1 * grad / (abs(grad) + 1e-8)
        assert stepper.masters["w"].item() == pytest.approx(expected, rel=1e-6)
        assert state["exp_avg"].item() == pytest.approx(0.2 * grad, rel=1e-6)
        assert state["exp_avg_sq"].item() == pytest.approx(0.1 * grad * grad, rel=1e-6)
        assert state["step"].item() == 1.0

    def test_second_step(self):
        """Both moments and both corrections, recomputed in double precision."""
        spec = OptimizerSpec(name="adam", lr=0.1, betas=(0.8, 0.9))
        stepper = Stepper(spec, params={"w": torch.tensor([1.0])})
        w, m, v = 1.0, 0.0, 0.0
        for count, grad in enumerate((3.0, -0.5), start=1):
            stepper.step({"w": torch.tensor([grad])})
            m, v = 0.8 * m + 0.2 * grad, 0.9 * v + 0.1 * grad**2
            w -= 0.1 * (m / (1 - 0.8**count)) / (math.sqrt(v / (1 - 0.9**count)) + 1e-8)
        assert stepper.masters["w"].item() == pytest.approx(w, rel=1e-6)

    def test_adamw_decays_apart_from_the_gradient(self):
        """With a zero gradient AdamW still shrinks w by lr * decay, exactly: 4 * (1 - 1/4)."""
        spec = OptimizerSpec(name="adamw", lr=0.5, weight_decay=0.5)
        stepper = Stepper(spec, params={"w": torch.tensor([4.0])})
        stepper.step({"w": torch.zeros(1)})
        assert stepper.masters["w"].item() == 3.0

    def test_adam_decays_through_the_gradient(self):
        """There the decay is normalised away: the first step is lr long."""
        spec = OptimizerSpec(name="adam", lr=0.5, weight_decay=0.5)
        stepper = Stepper(spec, params={"w": torch.tensor([4.0])})
        stepper.step({"w": torch.zeros(1)})
        assert stepper.masters["w"].item() == pytest.approx(3.5, rel=1e-6)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
class TestMasters:
    """Copies in fp32, of any shape."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_master_is_an_fp32_copy(self, name, dtype):
        """The param handed in is not touched, also where nothing is to be cast."""
        param = torch.ones(2, dtype=dtype)
        stepper = Stepper(OptimizerSpec(name=name), params={"w": param})
        stepper.step({"w": torch.ones(2)})
        assert stepper.masters["w"].dtype == torch.float32
        assert torch.equal(param, torch.ones(2, dtype=dtype))

    def test_empty_and_scalar_masters_step(self, name):
        """A zero-element param neither fails nor hinders the others."""
        params = {"empty": torch.ones(0, 3), "scalar": torch.ones(())}
        stepper = Stepper(OptimizerSpec(name=name, lr=0.5), params=params)
        stepper.step({key: torch.ones_like(value) for key, value in params.items()})
        assert stepper.masters["empty"].shape == (0, 3)
        assert stepper.masters["scalar"].item() == pytest.approx(0.5)


class TestWalkthrough:
    """One Adam step of W_q, with the gradients that the walkthrough gives."""

    @pytest.fixture
    def stepper(self):
        """Return the stepper after that step."""
        stepper = Stepper(OptimizerSpec(name="adam"), params={"W_q": torch.tensor(walkthrough.W_Q)})
        grads = [torch.tensor(grad) for grad in walkthrough.W_Q_GRADS]
        total = add_ranks(grads, order="linear")
        stepper.step({"W_q": master_gradient(total, divide="post", world_size=2)})
        return stepper

    def test_weights_to_three_decimals(self, stepper):
        """All 16 as printed."""
        rounded = stepper.masters["W_q"].double().round(decimals=3)
        expected = torch.tensor(walkthrough.W_Q_AFTER_ADAM, dtype=torch.float64)
        assert torch.equal(rounded, expected.round(decimals=3))

    def test_first_element_in_detail(self, stepper):
        """W_q[0, 0]: m = 0.002, v = 4e-7, 0.12 -> 0.119."""
        state = stepper.state()["W_q"]
        assert state["exp_avg"][0, 0].item() == pytest.approx(0.002, rel=1e-6)
        assert state["exp_avg_sq"][0, 0].item() == pytest.approx(4e-7, rel=1e-5)
        assert stepper.masters["W_q"][0, 0].item() == pytest.approx(0.119, rel=1e-6)
