"""The oracle as a whole."""

from __future__ import annotations

import pytest
import torch

from zero_sim.errors import ModelError, UsageError
from zero_sim.reference import Reference, SumSite, SumSpan
from zero_sim.scenario.spec import OptimizerSpec, SystemSpec
from zero_sim.workloads import build_workload

BF16 = torch.bfloat16


def run(scenario, *, steps=2):
    """Return copies of grads, masters, params and state after some steps."""
    reference = Reference(scenario, workload=build_workload(scenario))
    for _ in range(steps):
        result = reference.step()
    return [
        tensor.clone()
        for group in (result.grads, result.masters, result.params, *result.state.values())
        for tensor in group.values()
    ]


class TestByHand:
    """A single param, injected gradients, SGD with lr 1: w = 1 - gradient."""

    def test_sum_over_ranks(self, make_scenario, inject):
        """Without a division the optimizer gets the sum."""
        workload = inject([[[1.0], [2.0]], [[4.0], [8.0]]])
        result = Reference(make_scenario(micros=2), workload=workload).step()
        assert result.grads["w"].item() == 15.0
        assert result.masters["w"].item() == -14.0
        assert result.losses[1, 0].item() == 4.0

    @pytest.mark.parametrize(
        ("divide", "reduced", "master"),
        [("none", 6.0, -5.0), ("post", 6.0, -2.0), ("pre", 3.0, -2.0)],
    )
    def test_division(self, make_scenario, inject, divide, reduced, master):
        """`post` leaves the reported gradient a sum, `pre` makes it a mean."""
        scenario = make_scenario(system=SystemSpec(divide=divide))
        result = Reference(scenario, workload=inject([[[2.0]], [[4.0]]])).step()
        assert result.grads["w"].item() == reduced
        assert result.masters["w"].item() == master

    def test_pre_divides_the_accumulated_gradient(self, make_scenario, inject):
        """(1 + 1 + 1) / 3 = 1 on each rank; dividing each micro-batch first gives less in bf16."""
        scenario = make_scenario(size=3, micros=3, system=SystemSpec(divide="pre"))
        result = Reference(scenario, workload=inject([[[1.0]] * 3] * 3, dtype=BF16)).step()
        assert result.grads["w"].item() == 3.0

    @pytest.mark.parametrize(
        ("order", "total"), [("linear", 256.0), ("linear-fp32", 258.0), ("tree", 256.0)]
    )
    def test_order_of_the_world_is_used(self, make_scenario, inject, order, total):
        """bf16 256 + 1 + 1, by order."""
        workload = inject([[[256.0]], [[1.0]], [[1.0]]], dtype=BF16)
        result = Reference(make_scenario(size=3, order=order), workload=workload).step()
        assert result.grads["w"].item() == total

    def test_ring_takes_its_spans_from_the_caller(self, make_scenario, inject):
        """Two elements of one param are in two chunks."""
        workload = inject([[[256.0] * 2], [[1.0] * 2], [[1.0] * 2]], dtype=BF16)
        reference = Reference(make_scenario(size=3, order="ring"), workload=workload)
        spans = [
            SumSpan(
                start=rank,
                stop=rank + 1,
                site=SumSite(kind="reduce_scatter", elems=3, offset=rank, ends_on=rank),
            )
            for rank in (0, 1)
        ]
        result = reference.step({"w": spans, "unused": spans})
        assert result.grads["w"].tolist() == [258.0, 256.0]

    def test_ring_without_spans_names_the_param(self, make_scenario, inject):
        workload = inject([[[1.0]], [[1.0]]])
        reference = Reference(make_scenario(order="ring"), workload=workload)
        site = SumSite(kind="reduce", elems=1, offset=0)
        with pytest.raises(UsageError, match="param 'unused'"):
            reference.step({"w": [SumSpan(start=0, stop=1, site=site)]})

    def test_param_is_the_cast_master(self, make_scenario, inject):
        """1 - 2^-9 is halfway between two bf16 values and rounds to even; the master keeps it."""
        workload = inject([[[2.0**-9]]], dtype=BF16)
        result = Reference(make_scenario(size=1), workload=workload).step()
        assert result.masters["w"].item() == 1 - 2.0**-9
        assert result.params["w"].item() == 1.0
        assert result.params["w"].dtype == BF16

    def test_nonzero_fraction_counts_all_params(self, make_scenario, inject):
        """Two of w's three elements are nonzero; `unused` adds two zeros: 2 of 5."""
        workload = inject([[[1.0, 0.0, 2.0]], [[1.0, 0.0, 2.0]]])
        result = Reference(make_scenario(), workload=workload).step()
        assert result.nonzero_fraction == pytest.approx(2 / 5)


class TestAgainstPlainTorch:
    """The same mathematics with `backward` and loops, on real workloads."""

    @pytest.mark.parametrize("name", ["mlp", "params", "transformer-260"])
    @pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
    def test_first_reduced_gradient(self, make_scenario, name, dtype):
        """Three ranks, two micro-batches, bit for bit."""
        torch.set_num_threads(1)
        scenario = make_scenario(name, size=3, micros=2, dtype=dtype, shapes=((3,), (), (0,)))
        workload = build_workload(scenario)
        total = None
        for rank in range(3):
            module = workload.build()
            for micro in range(2):
                batch = workload.batch(step=0, rank=rank, micro=micro)
                workload.loss(module, batch).backward()
            grads = [param.grad for param in module.parameters()]
            total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
        got = Reference(scenario, workload=workload).step().grads.values()
        for left, right in zip(got, total, strict=True):
            assert torch.equal(left, right)


class TestRuns:
    """Several steps of real workloads."""

    @pytest.mark.parametrize(
        "name", ["mlp", "params", "transformer-260", "digits", "unusual", "fp8"]
    )
    @pytest.mark.parametrize("optim", ["adamw", "adam", "sgd"])
    def test_two_runs_are_equal(self, make_scenario, name, optim):
        """The global random state does not matter."""
        spec = OptimizerSpec(name=optim, momentum=0.9 if optim == "sgd" else 0.0)
        scenario = make_scenario(name, optim=spec, dtype="bf16", shapes=((2, 3), (0,)))
        first = run(scenario)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(99)
            second = run(scenario)
        assert len(first) == len(second)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    def test_seed_changes_the_run(self, make_scenario):
        """Weights and data depend on the seed."""
        zero, one = (run(make_scenario(seed=seed)) for seed in (0, 1))
        assert not torch.equal(zero[0], one[0])

    def test_foreach_does_not_affect_the_reference(self, make_scenario):
        runs = [run(make_scenario(optim=OptimizerSpec(foreach=foreach))) for foreach in (0, 1)]
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))

    def test_steps_count_up_and_weights_move(self, make_scenario):
        """Each step reports its index, Adam's counter and new params."""
        scenario = make_scenario(optim=OptimizerSpec())
        reference = Reference(scenario, workload=build_workload(scenario))
        seen = []
        for index in range(3):
            result = reference.step()
            name = next(iter(result.params))
            assert result.step == index
            assert result.state[name]["step"].item() == index + 1
            seen.append(result.params[name].clone())
        assert not torch.equal(seen[0], seen[1])
        assert not torch.equal(seen[1], seen[2])

    def test_model_without_params_is_refused(self, make_scenario):
        """There is nothing to train."""
        scenario = make_scenario("params", shapes=())
        with pytest.raises(ModelError, match="at least one param"):
            Reference(scenario, workload=build_workload(scenario))

    def test_params_without_elements_count_as_zero(self, make_scenario):
        """The run completes, and nonzero_fraction reports that nothing was trained."""
        scenario = make_scenario("params", shapes=((0,), (2, 0)))
        result = Reference(scenario, workload=build_workload(scenario)).step()
        assert result.nonzero_fraction == 0.0
