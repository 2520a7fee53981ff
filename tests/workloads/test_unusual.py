"""Network of awkward params, each with its kind and its use."""

from __future__ import annotations

import pytest
import torch

from zero_sim.scenario.spec import DataSpec, RunSpec, WorldSpec
from zero_sim.workloads import build_workload

ALWAYS = {"embedding", "twice", "empty", "strided", "router", "scale"}


@pytest.fixture
def workload(make_scenario):
    """Return the workload in bf16, of three ranks and two micro-batches."""
    return build_workload(
        make_scenario(
            "unusual", dtype="bf16", world=WorldSpec(size=3), run=RunSpec(micro_batches=2)
        )
    )


def used(workload, **at):
    """Return the names of the params that a micro-batch's loss reaches."""
    module = workload.build()
    workload.loss(module, workload.batch(step=0, **at)).backward()
    return {name for name, param in module.named_parameters() if param.grad is not None}


class TestKinds:
    """Kinds of awkward params."""

    def test_tied_param_has_one_name(self, workload):
        """The head's weight is the embedding itself, and is listed once."""
        module = workload.build()
        names = [name for name, _ in module.named_parameters()]
        assert module.head.weight is module.embedding
        assert "head.weight" not in names
        assert len(names) == 10

    def test_only_frozen_is_frozen(self, workload):
        params = workload.build().named_parameters()
        assert [name for name, param in params if not param.requires_grad] == ["frozen"]

    def test_shapes(self, workload):
        """One has no elements, one has no dims, one is not contiguous."""
        params = dict(workload.build().named_parameters())
        assert [name for name, param in params.items() if not param.numel()] == ["empty"]
        assert [name for name, param in params.items() if not param.dim()] == ["scale"]
        assert [name for name, p in params.items() if not p.is_contiguous()] == ["strided"]

    def test_router_stays_in_fp32(self, workload):
        module = workload.build()
        wide = [n for n, param in module.named_parameters() if param.dtype == torch.float32]
        assert wide == ["router"]
        loss = workload.loss(module, workload.batch(step=0, rank=0, micro=0))
        assert (loss.dtype, loss.shape) == (torch.float32, ())

    def test_all_is_fp32_in_fp32(self, make_scenario):
        module = build_workload(make_scenario("unusual")).build()
        assert {param.dtype for param in module.parameters()} == {torch.float32}


class TestUse:
    """Params by the ranks and micro-batches that use them."""

    @pytest.mark.parametrize(
        ("rank", "micro", "sometimes"),
        [
            (0, 0, {"rank_zero", "micro_zero"}),
            (0, 1, {"rank_zero"}),
            (1, 0, {"micro_zero"}),
            (2, 1, set()),
        ],
    )
    def test_by_rank_and_micro_batch(self, workload, rank, micro, sometimes):
        """`unused` is never used, and `frozen` has no gradient."""
        assert used(workload, rank=rank, micro=micro) == ALWAYS | sometimes
        assert workload.batch(step=0, rank=rank, micro=micro).uses == sometimes

    def test_shared_data_are_used_alike(self, make_scenario):
        """If all ranks have rank 0's data, they use the same params."""
        workload = build_workload(make_scenario("unusual", data=DataSpec(ranks="same")))
        assert used(workload, rank=1, micro=0) == used(workload, rank=0, micro=0)

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_gradients_are_finite_and_mostly_nonzero(self, make_scenario, dtype):
        """Gradients of used params have the param's dtype."""
        workload = build_workload(make_scenario("unusual", dtype=dtype))
        module = workload.build()
        workload.loss(module, workload.batch(step=0, rank=0, micro=0)).backward()
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        assert all(p.grad.dtype == p.dtype for p in module.parameters() if p.grad is not None)
        flat = torch.cat([grad.reshape(-1).float() for grad in grads])
        assert flat.isfinite().all()
        assert flat.count_nonzero() >= 0.9 * flat.numel()

    def test_twice_differs_from_once(self, workload):
        """Each use contributes to the gradient, so the loss is not linear in the param."""
        module = workload.build()
        batch = workload.batch(step=0, rank=0, micro=0)
        before = workload.loss(module, batch).item()
        with torch.no_grad():
            module.twice.zero_()
        assert workload.loss(module, batch).item() != before
