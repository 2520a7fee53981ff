"""Params in fp8: lookup of their scales, and quantization of masters."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.configs import zero_config
from zero_sim.errors import ModelError
from zero_sim.zero import DistributedDataParallel, DistributedOptimizer, Seams
from zero_sim.zero.groups import build_redundancy_groups
from zero_sim.zero.variants.fp8 import Fp8Cast, choose_scale, find_scale, measure_amax, quantize_

FP8 = Seams(cast=Fp8Cast)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Product(torch.autograd.Function):
    """Product of values and scale, with its gradient."""

    @staticmethod
    def forward(ctx, values, scale):
        return values.float() * scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Weights(nn.Module):
    """Params `w0`, `w1`, ... of ones in fp8; a dtype of None stands for bf16."""

    def __init__(self, *dtypes, elems=5, grad_dtype=torch.bfloat16):
        super().__init__()
        for index, dtype in enumerate(dtypes):
            param = nn.Parameter(torch.ones(elems, dtype=dtype or torch.bfloat16))
            param.grad_dtype = grad_dtype
            self.register_parameter(f"w{index}", param)
            if dtype is not None:
                self.register_buffer(f"w{index}_scale", torch.ones(()))

    def forward(self, factors):
        """Return the sum of each weight times its factor."""
        total = torch.zeros(())
        for (name, param), factor in zip(self.named_parameters(), factors, strict=True):
            scale = getattr(self, f"{name}_scale", None)
            weight = param.float() if scale is None else Product.apply(param, scale)
            total = total + (weight * factor).sum()
        return total


def build(module, **config):
    """Wrap for SGD with lr 1, so each step subtracts the gradient from the master."""
    config = zero_config(divide="none", **config)
    group = dist.group.WORLD
    ddp = DistributedDataParallel(
        module,
        config=config,
        group=build_redundancy_groups(group, redundancy=config.redundancy),
        seams=FP8,
    )
    return ddp, DistributedOptimizer(ddp, optim_factory=lambda ps: torch.optim.SGD(ps, lr=1.0))


def take_step(ddp, optimizer, *factors):
    """Take a step with these gradients on rank 0 and zeros elsewhere."""
    ddp(factors if ddp.rank == 0 else [0 * f for f in factors]).backward()
    ddp.finish_grad_sync()
    optimizer.step()
    optimizer.zero_grad()


class TestScaleFound:
    """The scale, a buffer named after its param."""

    def refuse(self, module, match):
        with pytest.raises(ModelError, match=match):
            find_scale(module, name="w0", param=module.w0)

    def test_survives_a_copy_of_the_module(self):
        """Buffers are copied with the values; torch forgets only grad_dtype."""
        module = copy.deepcopy(Weights(E4M3))
        module.w0.grad_dtype = torch.float32
        assert find_scale(module, name="w0", param=module.w0) is module.w0_scale

    def test_in_a_submodule(self):
        module = nn.Sequential(Weights(E4M3), Weights(E4M3))
        found = find_scale(module, name="1.w0", param=module[1].w0)
        assert found is module[1].w0_scale

    def test_missing(self):
        module = Weights(E4M3)
        del module.w0_scale
        self.refuse(module, "buffer 'w0_scale', saved with the module, .*, got none")

    def test_not_saved(self):
        """A checkpoint would lose it."""
        module = Weights(E4M3)
        module.register_buffer("w0_scale", torch.ones(()), persistent=False)
        self.refuse(module, "saved with the module")

    @pytest.mark.parametrize("scale", [torch.ones(1), torch.ones((), dtype=torch.float64)])
    def test_wrong_shape_or_dtype(self, scale):
        """A scale is a single fp32 number per param."""
        module = Weights(E4M3)
        module.w0_scale = scale
        self.refuse(module, r"0D fp32 buffer 'w0_scale'.*, got shape")

    @pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
    def test_not_positive_and_finite(self, value):
        module = Weights(E4M3)
        module.w0_scale.fill_(value)
        self.refuse(module, f"positive, finite scale of 'w0', got {value}")

    def test_gradient_in_fp8(self):
        """Autograd would round it unless the module declares a wider grad_dtype."""
        module = Weights(E4M3, grad_dtype=E4M3)
        self.refuse(module, r"got grad_dtype=torch.float8_e4m3fn. Set param.grad_dtype =")

    def test_shared_param_with_a_scale_each(self):
        """Only one of the two scales would be updated."""
        one, two = Weights(E4M3), Weights(E4M3)
        two.w0 = one.w0
        with pytest.raises(ModelError, match=r"one scale for '0.w0' .*, got 2"):
            find_scale(nn.Sequential(one, two), name="0.w0", param=one.w0)

    def test_shared_param_with_a_shared_scale(self):
        one, two = Weights(E4M3), Weights(E4M3)
        two.w0, two.w0_scale = one.w0, one.w0_scale
        found = find_scale(nn.Sequential(one, two), name="0.w0", param=one.w0)
        assert found is one.w0_scale


class TestChooseScale:
    """The least power of two that keeps the greatest magnitude within fp8."""

    @pytest.mark.parametrize(
        ("dtype", "amax", "scale"),
        [
            (E4M3, 448.0, 1.0),
            (E4M3, 448.0001, 2.0),
            (E4M3, 224.0, 0.5),
            (E4M3, 1.0, 2.0**-8),
            (E5M2, 57344.0, 1.0),
            (E5M2, 57348.0, 2.0),
            (E5M2, 1.0, 2.0**-15),
            (E4M3, 2.0**-149, 2.0**-126),
            (E5M2, 2.0**-120, 2.0**-126),
            (E4M3, 3.4e38, 2.0**119),
            (E5M2, 3.4e38, 2.0**112),
            (E4M3, 0.0, 1.0),
            (E4M3, math.inf, 1.0),
            (E5M2, math.nan, 1.0),
        ],
    )
    def test_values(self, dtype, amax, scale):
        """The borders of each format and of fp32, and inputs without a usable magnitude."""
        assert choose_scale(torch.tensor(amax), dtype=dtype).item() == scale

    @pytest.mark.parametrize("dtype", [E4M3, E5M2])
    def test_keeps_fp8_values_exactly(self, dtype):
        """Values of fp8 survive scaling by any power of two."""
        values = torch.arange(256, dtype=torch.uint8).view(dtype)
        values = values[values.float().isfinite()].float()
        for exponent in (-40, 0, 60):
            master = values * 2.0**exponent
            scale = choose_scale(measure_amax(master), dtype=dtype)
            quantized = torch.empty_like(master, dtype=dtype)
            quantize_(quantized, master, scale=scale)
            assert torch.equal(quantized.float() * scale, master)


class TestQuantize:
    """Rounding to nearest, ties to even, saturated at the greatest number."""

    @pytest.mark.parametrize(("dtype", "greatest"), [(E4M3, 448.0), (E5M2, 57344.0)])
    def test_saturates(self, dtype, greatest):
        """A cast would make some of these infinite or NaN."""
        master = torch.tensor([1e6, -1e6, math.inf, -math.inf])
        values = torch.empty(4, dtype=dtype)
        quantize_(values, master, scale=torch.ones(()))
        assert values.float().tolist() == [greatest, -greatest] * 2

    def test_ties_to_even(self):
        """Near 16, numbers of e4m3 are 2 apart."""
        values = torch.empty(3, dtype=E4M3)
        quantize_(values, torch.tensor([17.0, 19.0, 17.01]), scale=torch.ones(()))
        assert values.float().tolist() == [16.0, 20.0, 18.0]

    def test_keeps_a_nan(self):
        values = torch.zeros(1, dtype=E5M2)
        quantize_(values, torch.tensor([math.nan]), scale=torch.ones(()))
        assert values.float().isnan().all()


class TestMeasureAmax:
    """The maximum magnitude that ranks exchange."""

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_nonfinite_values_give_infinity(self, bad):
        assert measure_amax(torch.tensor([1.0, bad, -3.0])).item() == math.inf

    def test_is_a_magnitude(self):
        assert measure_amax(torch.tensor([1.0, -3.0])).item() == 3.0


class TestBuffers:
    """A separate buffer for each fp8 format."""

    def test_by_format(self, run_ranks):
        """Elements take one byte, and gradients have the param's grad_dtype."""

        def program(rank):
            ddp, _ = build(Weights(E4M3, None, E5M2, E4M3))
            return [
                (str(b.plan.key), b.param_data.element_size(), b.grad_data.dtype, b.plan.numel)
                for b in ddp.buffers
            ]

        results, _ = run_ranks(2, program)
        assert results[0] == [
            ("dense/fp8-e4m3", 1, torch.bfloat16, 10),
            ("dense/bf16", 2, torch.bfloat16, 5),
            ("dense/fp8-e5m2", 1, torch.bfloat16, 5),
        ]

    def test_align_to_bytes(self, run_ranks):
        """One byte is one element."""

        def program(rank):
            ddp, _ = build(Weights(E4M3), align_bytes=16)
            return ddp.buffers[0].plan.buckets[0].shard_sizes[0]

        assert run_ranks(2, program)[0] == [16, 16]

    def test_two_gradient_dtypes_are_refused(self, lone_group):
        """grad_dtype="fp32" makes them equal."""
        module = Weights(E4M3, E4M3)
        module.w1.grad_dtype = torch.float32
        with pytest.raises(ModelError, match=r"one dtype for the gradients .* grad_dtype='fp32'"):
            build(module)
        assert build(module, grad_dtype="fp32")[0].buffers[0].grad_data.dtype is torch.float32

    def test_first_ranks_scale_replaces_all(self, run_ranks):

        def program(rank):
            module = Weights(E4M3)
            module.w0_scale.fill_(1.0 + rank)
            _, optimizer = build(module)
            return module.w0_scale.item(), [f.master.tolist() for f in optimizer.fragments()]

        assert run_ranks(2, program)[0] == [(1.0, [[1.0] * 3]), (1.0, [[1.0] * 2])]


class TestStep:
    """A step from fp8 to fp32 and back."""

    FACTORS = torch.tensor([0.0, 0.0, 0.0, 0.0, 3585.0])

    @pytest.mark.parametrize(
        ("world_size", "config"),
        [
            (1, {"stage": 0}),
            (3, {"stage": 0}),
            (2, {}),
            (4, {"redundancy": 2}),
            (9, {}),
            (3, {"partition": "uneven"}),
            (2, {"overlap_grads": True, "overlap_params": True}),
        ],
    )
    def test_every_rank_has_the_same_scale(self, run_ranks, world_size, config):
        """The last element decides the scale, and most of nine ranks own nothing."""

        def program(rank):
            module = Weights(E4M3, E5M2)
            ddp, optimizer = build(module, **config)
            take_step(ddp, optimizer, self.FACTORS, self.FACTORS)
            ddp.finish_param_gather()
            return [
                (scale.item(), param.float().tolist())
                for param, scale in ((module.w0, module.w0_scale), (module.w1, module.w1_scale))
            ]

        # The gradient is 3584 in bf16, so the last master is 1 - 3584 = -3583. Divided by 8 it is
        # -447.9, by 2**-4 it is -57328. The nearest are -448 in e4m3 and -57344 in e5m2.
        expected = [(8.0, [0.125] * 4 + [-448.0]), (0.0625, [16.0] * 4 + [-57344.0])]
        assert run_ranks(world_size, program)[0] == [expected] * world_size

    def test_takes_one_maximum_for_all_params(self, run_ranks):
        """Every rank takes a single maximum over its shard group."""

        def program(rank):
            ddp, optimizer = build(Weights(E4M3, None, E5M2), redundancy=2)
            take_step(ddp, optimizer, *[self.FACTORS] * 3)

        _, log = run_ranks(4, program)
        asked = [r for r in log.collectives if r.detail == "MAX"]
        assert [(r.rank, r.elems) for r in sorted(asked)] == [(rank, 2) for rank in range(4)]
        assert {r.group_ranks for r in asked} == {(0, 1), (2, 3)}

    def test_takes_no_maximum_without_fp8_params(self, run_ranks):

        def program(rank):
            ddp, optimizer = build(Weights(None))
            take_step(ddp, optimizer, self.FACTORS)

        _, log = run_ranks(2, program)
        assert not [r for r in log.collectives if r.detail == "MAX"]

    def test_frozen_param_is_unchanged(self, run_ranks):

        def program(rank):
            module = Weights(E4M3, E4M3)
            module.w0_scale.fill_(3.0)
            ddp, optimizer = build(module)
            module.w0.requires_grad_(False)
            take_step(ddp, optimizer, self.FACTORS, self.FACTORS)
            return module.w0_scale.item(), module.w0.float().tolist(), module.w1_scale.item()

        assert run_ranks(2, program)[0] == [(3.0, [1.0] * 5, 8.0)] * 2

    def test_gathers_bytes(self, run_ranks):
        """gloo does not support fp8."""

        def program(rank):
            ddp, optimizer = build(Weights(E4M3))
            take_step(ddp, optimizer, self.FACTORS)

        _, log = run_ranks(2, program)
        kinds = {r.kind: r.dtype for r in log.collectives}
        assert kinds["all_gather"] == "uint8"
        assert not [r for r in log.collectives if "float8" in r.dtype]

    @pytest.mark.parametrize("partition", ["padded", "uneven"])
    def test_over_gloo(self, lone_group, partition):
        module = Weights(E4M3, E5M2)
        ddp, optimizer = build(module, partition=partition)
        take_step(ddp, optimizer, self.FACTORS, self.FACTORS)
        assert (module.w0_scale.item(), module.w1_scale.item()) == (8.0, 0.0625)
