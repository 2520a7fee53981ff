"""Local gradients: accumulation, isolation and the origin of a NaN."""

from __future__ import annotations

import math

import pytest
import torch

from zero_sim.reference import NonFinite, Reference
from zero_sim.reference.replay import isolated
from zero_sim.scenario.spec import DataSpec, NanSpec, SystemSpec
from zero_sim.workloads import build_workload, seed_of

BF16 = torch.bfloat16


class TestAccumulation:
    """Micro-batches of a rank: 256 + 1 + 1 is 256 in bf16 and 258 in fp32."""

    @pytest.mark.parametrize(("grad_dtype", "total"), [("param", 256.0), ("fp32", 258.0)])
    def test_rounds_to_the_grad_dtype(self, make_scenario, inject, grad_dtype, total):
        """Each addition is in that dtype, in order."""
        scenario = make_scenario(
            size=1, micros=3, system=SystemSpec(divide="none", grad_dtype=grad_dtype)
        )
        workload = inject([[[256.0], [1.0], [1.0]]], dtype=BF16)
        grad = Reference(scenario, workload=workload).step().grads["w"]
        assert grad.item() == total
        assert grad.dtype == (BF16 if grad_dtype == "param" else torch.float32)

    def test_unused_param_gets_zeros(self, make_scenario, inject):
        result = Reference(make_scenario(), workload=inject([[[1.0]], [[2.0]]])).step()
        assert torch.equal(result.grads["unused"], torch.zeros(2))
        assert torch.equal(result.params["unused"], torch.ones(2))


class TestIsolation:
    """Isolation from the caller's random numbers and threads."""

    def test_random_state_is_untouched(self, make_scenario):
        before = torch.random.get_rng_state()
        scenario = make_scenario()
        Reference(scenario, workload=build_workload(scenario)).step()
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_random_state_is_untouched_by_a_failure(self):
        before = torch.random.get_rng_state()
        with pytest.raises(ZeroDivisionError), isolated():
            1 / int(torch.randint(1, ()))
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_one_thread_inside_and_the_callers_count_after(self):
        """Linear layers in fp32 have other bits on two threads."""
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            with isolated():
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(before)

    def test_forward_draws_from_the_seed_of_the_rank(self, make_scenario, inject):
        """A random forward draws the numbers of `torch.manual_seed(seed_of(...))` on that rank."""

        class Noisy(inject):
            def loss(self, module, batch):
                return (module.w * torch.rand(1)).sum()

        scenario = make_scenario(size=2, micros=2)
        result = Reference(scenario, workload=Noisy([[[0.0]] * 2] * 2)).step()
        for (rank, micro), loss in result.losses.items():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed_of(scenario, step=0, rank=rank, micro=micro))
                assert torch.equal(loss, torch.rand(1).sum())
        assert len({loss.item() for loss in result.losses.values()}) == 4

    def test_works_under_no_grad(self, make_scenario, inject):
        """The caller's grad mode has no effect."""
        reference = Reference(make_scenario(), workload=inject([[[1.0]], [[2.0]]]))
        with torch.no_grad():
            assert reference.step().grads["w"].item() == 3.0


class TestNonFinite:
    """The first local gradient that is not finite."""

    def test_names_rank_micro_param_and_element(self, make_scenario, inject):
        """The order is by rank, then micro-batch, then element."""
        ok, bad = [0.0, 0.0, 0.0], [0.0, math.inf, math.nan]
        workload = inject([[ok, ok], [ok, bad], [bad, bad]])
        result = Reference(make_scenario(size=3, micros=2), workload=workload).step()
        assert result.nonfinite == NonFinite(rank=1, micro=1, param="w", index=1, value=math.inf)

    def test_infinities_that_cancel_are_still_named(self, make_scenario, inject):
        """inf - inf is a NaN, so the sum shows them."""
        workload = inject([[[-math.inf]], [[math.inf]]])
        found = Reference(make_scenario(), workload=workload).step().nonfinite
        assert found is not None
        assert (found.rank, found.value) == (0, -math.inf)

    def test_overflow_of_the_sum_has_no_local_origin(self, make_scenario, inject):
        """Both ranks' gradients are finite, and their sum is not."""
        workload = inject([[[3e38]], [[3e38]]])
        result = Reference(make_scenario(), workload=workload).step()
        assert result.grads["w"].item() == math.inf
        assert result.nonfinite is None

    @pytest.mark.parametrize(
        "name", ["mlp", "params", "transformer-260", "digits", "unusual", "fp8"]
    )
    def test_planted_nan_is_traced_to_its_rank(self, make_scenario, name):
        """It appears at its step, with the weights of that step, and not before."""
        data = DataSpec(nan=NanSpec(step=1, rank=2))
        scenario = make_scenario(name, size=3, micros=2, data=data, shapes=((0,), (2,)))
        reference = Reference(scenario, workload=build_workload(scenario))
        assert reference.step().nonfinite is None
        found = reference.step().nonfinite
        assert found is not None
        assert (found.rank, found.micro) == (2, 0)
        assert math.isnan(found.value)
        if name == "params":
            assert (found.param, found.index) == ("p1", 0)


class TestDigests:
    """Digests of the ranks' data."""

    def test_distinct_data_have_distinct_digests(self, make_scenario):
        scenario = make_scenario(size=3)
        reference = Reference(scenario, workload=build_workload(scenario))
        digests = [d for _ in range(2) for d in reference.step().data_digests.values()]
        assert len(set(digests)) == 6

    def test_same_data_have_one_digest(self, make_scenario):
        scenario = make_scenario(size=3, data=DataSpec(ranks="same"), dtype="bf16")
        digests = Reference(scenario, workload=build_workload(scenario)).step().data_digests
        assert list(digests) == [0, 1, 2]
        assert len(set(digests.values())) == 1
