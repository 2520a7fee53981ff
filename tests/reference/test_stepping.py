"""Optimizer steps by hand."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from zero_sim.reference.adding import add_ranks
from zero_sim.reference.stepping import Stepper
from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.spec import OptimizerName, OptimizerSpec
from zero_sim.workloads import transformer as walkthrough


class TestSgd:
    """SGD with dyadic numbers, so that every value is exact."""

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

    def test_momentum_does_not_change_the_gradient(self):
        """The buffer is torch's own tensor, not the argument."""
        spec = OptimizerSpec(name="sgd", lr=0.5, momentum=0.5)
        stepper = Stepper(spec, params={"w": torch.tensor([1.0])})
        grad = torch.tensor([1.0])
        stepper.step({"w": grad})
        stepper.step({"w": torch.tensor([1.0])})
        assert grad.item() == 1.0

    def test_weight_decay_applies_to_a_zero_gradient(self):
        """A zero gradient counts: w - lr * decay * w."""
        spec = OptimizerSpec(name="sgd", lr=0.5, weight_decay=0.5)
        stepper = Stepper(spec, params={"w": torch.tensor([4.0])})
        stepper.step({"w": torch.zeros(1)})
        assert stepper.masters["w"].item() == 3.0

    def test_plain_sgd_keeps_no_state_tensors(self):
        stepper = Stepper(OptimizerSpec(name="sgd"), params={"w": torch.ones(1)})
        stepper.step({"w": torch.ones(1)})
        assert stepper.state() == {"w": {}}


class TestAdam:
    """Adam, whose first step has a closed form: w - lr * g / (|g| + eps)."""

    @pytest.mark.parametrize("grad", [3.0, -0.5, 1e-8])
    def test_first_step(self, grad):
        """Moments are (1 - beta) * g and (1 - beta2) * g^2; bias correction removes the betas."""
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

    def test_adamw_decay_is_separate_from_the_gradient(self):
        """With a zero gradient AdamW still shrinks w by lr * decay, exactly: 4 * (1 - 1/4)."""
        spec = OptimizerSpec(name="adamw", lr=0.5, weight_decay=0.5)
        stepper = Stepper(spec, params={"w": torch.tensor([4.0])})
        stepper.step({"w": torch.zeros(1)})
        assert stepper.masters["w"].item() == 3.0

    def test_adam_decays_through_the_gradient(self):
        """Adam normalizes the decay away, so the first step has length lr."""
        spec = OptimizerSpec(name="adam", lr=0.5, weight_decay=0.5)
        stepper = Stepper(spec, params={"w": torch.tensor([4.0])})
        stepper.step({"w": torch.zeros(1)})
        assert stepper.masters["w"].item() == pytest.approx(3.5, rel=1e-6)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
class TestMasters:
    """Masters: copies in fp32, of any shape."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_master_is_an_fp32_copy(self, name, dtype):
        """The param is not changed, even if no cast is needed."""
        param = torch.ones(2, dtype=dtype)
        stepper = Stepper(OptimizerSpec(name=name), params={"w": param})
        stepper.step({"w": torch.ones(2)})
        assert stepper.masters["w"].dtype == torch.float32
        assert torch.equal(param, torch.ones(2, dtype=dtype))

    def test_empty_and_scalar_masters_step(self, name):
        params = {"empty": torch.ones(0, 3), "scalar": torch.ones(())}
        stepper = Stepper(OptimizerSpec(name=name, lr=0.5), params=params)
        stepper.step({key: torch.ones_like(value) for key, value in params.items()})
        assert stepper.masters["empty"].shape == (0, 3)
        assert stepper.masters["scalar"].item() == pytest.approx(0.5)


class TestWalkthrough:
    """An Adam step of W_q with the walkthrough's gradients."""

    @pytest.fixture
    def stepper(self):
        """Return the stepper after that step."""
        stepper = Stepper(OptimizerSpec(name="adam"), params={"W_q": torch.tensor(walkthrough.W_Q)})
        grads = [torch.tensor(grad) for grad in walkthrough.W_Q_GRADS]
        total = add_ranks(grads, order="linear")
        stepper.step({"W_q": total / 2})
        return stepper

    def test_weights_to_three_decimals(self, stepper):
        """All 16 weights equal the printed ones."""
        rounded = stepper.masters["W_q"].double().round(decimals=3)
        expected = torch.tensor(walkthrough.W_Q_AFTER_ADAM, dtype=torch.float64)
        assert torch.equal(rounded, expected.round(decimals=3))

    def test_first_element_in_detail(self, stepper):
        """W_q[0, 0]: m = 0.002, v = 4e-7, 0.12 -> 0.119."""
        state = stepper.state()["W_q"]
        assert state["exp_avg"][0, 0].item() == pytest.approx(0.002, rel=1e-6)
        assert state["exp_avg_sq"][0, 0].item() == pytest.approx(4e-7, rel=1e-5)
        assert stepper.masters["W_q"][0, 0].item() == pytest.approx(0.119, rel=1e-6)


class TestEveryOptimizer:
    """First step from w = 1 with gradient 2 and lr 0.1, by each paper's formula."""

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("rmsprop", 1 - 0.1 * 2 / math.sqrt(0.01 * 4)),
            ("adagrad", 1 - 0.1 * 2 / 2),
            ("adamax", 1 - 0.1 * 2 / 2),
            ("radam", 1 - 0.1 * 2),
            ("rprop", 1 - 0.1),
            ("asgd", 1 - 0.1 * (2 + 1e-4)),
            ("adadelta", 1 - 0.1 * 2 * math.sqrt(1e-8 / (0.1 * 4))),
        ],
    )
    def test_first_step(self, name, expected):
        """Moments start at zero; bias correction, if any, compensates."""
        stepper = Stepper(OptimizerSpec(name=name, lr=0.1), params={"w": torch.ones(1)})
        stepper.step({"w": torch.tensor([2.0])})
        assert stepper.masters["w"].item() == pytest.approx(expected, rel=1e-6, abs=1e-6)

    def test_nadam(self):
        """A mean of the gradient and its moment, weighted by momenta that grow with the step."""
        stepper = Stepper(OptimizerSpec(name="nadam", lr=0.1), params={"w": torch.ones(1)})
        stepper.step({"w": torch.tensor([2.0])})
        mu, then = (0.9 * (1 - 0.5 * 0.96 ** (0.004 * count)) for count in (1, 2))
        moved = (1 - mu) / (1 - mu) * 2 + then / (1 - mu * then) * 0.2
        assert stepper.masters["w"].item() == pytest.approx(1 - 0.1 * moved / 2, rel=1e-6)

    def test_nesterov_looks_ahead(self):
        """Buffer 1, step by 1 + 1/2 of it: 1 - 1/2 * 3/2."""
        spec = OptimizerSpec(name="sgd", lr=0.5, momentum=0.5, nesterov=True)
        stepper = Stepper(spec, params={"w": torch.ones(1)})
        stepper.step({"w": torch.ones(1)})
        assert stepper.masters["w"].item() == 0.25

    def test_amsgrad_keeps_the_largest_moment(self):
        """After gradients 2 and 0, the largest second moment is the first."""
        spec = OptimizerSpec(name="adam", amsgrad=True)
        stepper = Stepper(spec, params={"w": torch.ones(1)})
        stepper.step({"w": torch.tensor([2.0])})
        first = stepper.state()["w"]["exp_avg_sq"].clone()
        stepper.step({"w": torch.tensor([0.0])})
        state = stepper.state()["w"]
        assert torch.equal(state["max_exp_avg_sq"], first)
        assert state["exp_avg_sq"] < first

    def test_momentum_of_rmsprop(self):
        """The buffer contains the normalized gradient: 2 / 0.2."""
        spec = OptimizerSpec(name="rmsprop", lr=0.1, momentum=0.5)
        stepper = Stepper(spec, params={"w": torch.ones(1)})
        stepper.step({"w": torch.tensor([2.0])})
        assert stepper.state()["w"]["momentum_buffer"].item() == pytest.approx(10.0, rel=1e-6)

    @pytest.mark.parametrize("name", [n for n in get_args(OptimizerName) if n != "own"])
    def test_master_without_gradient_is_unchanged(self, name):
        """Value and state, including `step`, stay; a step creates no state without a gradient."""
        decay = 0.0 if name == "rprop" else 0.5
        stepper = Stepper(
            OptimizerSpec(name=name, weight_decay=decay),
            params={"a": torch.ones(2), "b": torch.ones(2), "never": torch.ones(2)},
        )
        grad, fresh = torch.tensor([2.0, -1.0]), stepper.state()["never"].keys()
        stepper.step({"a": grad.clone(), "b": grad.clone()})
        before = {key: value.clone() for key, value in stepper.state()["b"].items()}
        value = stepper.masters["b"].clone()
        stepper.step({"a": grad.clone()})
        assert torch.equal(stepper.masters["b"], value)
        assert before.keys() == stepper.state()["b"].keys()
        assert all(torch.equal(before[key], now) for key, now in stepper.state()["b"].items())
        assert stepper.state()["never"].keys() == fresh
        assert not torch.equal(stepper.masters["a"], value)

    @pytest.mark.parametrize(
        "name", [n for n in get_args(OptimizerName) if n not in (*WHOLE_PARAM_OPTIMIZERS, "own")]
    )
    def test_pieces_step_like_the_full_param(self, name):
        """These optimizers are elementwise."""
        decay = 0.0 if name == "rprop" else 0.1
        spec = OptimizerSpec(name=name, lr=0.1, weight_decay=decay)
        draws = torch.randn(4, 37, generator=torch.Generator().manual_seed(0))
        whole = Stepper(spec, params={"w": draws[0]})
        cut = Stepper(spec, params={"a": draws[0, :5], "b": draws[0, 5:]})
        for grad in draws[1:]:
            whole.step({"w": grad.clone()})
            cut.step({"a": grad[:5].clone(), "b": grad[5:].clone()})
        assert torch.equal(whole.masters["w"], torch.cat([cut.masters["a"], cut.masters["b"]]))
