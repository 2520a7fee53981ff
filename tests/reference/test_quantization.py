"""Params in fp8 by definition: the scale of a full master, and its values."""

from __future__ import annotations

import math

import pytest
import torch

from zero_sim.reference import Reference
from zero_sim.reference.quantization import decode, encode, scale_for
from zero_sim.scenario.spec import FreezeSpec, OptimizerSpec
from zero_sim.workloads import build_workload

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SGD = OptimizerSpec(name="sgd", lr=0.25)


class TestScale:
    """Scale: a power of two from the greatest magnitude."""

    @pytest.mark.parametrize(
        ("dtype", "master", "scale"),
        [
            (E4M3, [448.0, 1.0], 1.0),
            (E4M3, [-449.0, 1.0], 2.0),
            (E4M3, [224.0], 0.5),
            (E5M2, [57344.0], 1.0),
            (E5M2, [3.0], 2.0**-14),
            (E4M3, [2.0**-149], 2.0**-126),
            (E4M3, [3.4e38], 2.0**119),
            (E5M2, [3.4e38], 2.0**112),
            (E4M3, [0.0, -0.0], 1.0),
            (E4M3, [], 1.0),
            (E5M2, [1e9, math.inf], 1.0),
            (E5M2, [1e9, math.nan], 1.0),
        ],
    )
    def test_values(self, dtype, master, scale):
        """The borders of the formats, and masters without a usable magnitude."""
        assert scale_for(torch.tensor(master), dtype=dtype).item() == scale


class TestEncode:
    """Values, clamped and then rounded."""

    def test_known_master(self):
        """17 is midway between 16 and 18; 1e4 is beyond e4m3."""
        values = encode(torch.tensor([34.0, -1e4, 3.0]), scale=torch.tensor(2.0), dtype=E4M3)
        assert values.dtype is E4M3
        assert decode(values, scale=torch.tensor(2.0)).tolist() == [32.0, -896.0, 3.0]


class TestSteps:
    """Steps of the oracle with fp8 params."""

    def test_masters_start_as_the_decoded_params(self, make_scenario):
        """All weights are frozen, so their masters do not move."""
        module = build_workload(make_scenario("fp8", blocks=1)).build()
        freeze = tuple(
            FreezeSpec(param=f"0.{part}.weight", start=0, stop=9) for part in ("up", "down")
        )
        result = Reference(
            (scenario := make_scenario("fp8", blocks=1, freeze=freeze)),
            workload=build_workload(scenario),
        ).step()
        for name in ("0.up.weight", "0.down.weight"):
            param, scale = module.get_parameter(name), module.get_buffer(f"{name}_scale")
            assert torch.equal(result.masters[name], param.float() * scale)
            assert torch.equal(result.scales[name], scale)
            assert torch.equal(result.params[name].view(torch.uint8), param.view(torch.uint8))

    def test_params_follow_their_masters(self, make_scenario):
        """Each step has a new scale, and the values are within half a unit of e4m3."""
        scenario = make_scenario("fp8", fp8_format="e4m3", optim=SGD)
        reference = Reference(scenario, workload=build_workload(scenario))
        for _ in range(3):
            result = reference.step()
            assert len(result.scales) == 4
            for name, scale in result.scales.items():
                master, param = result.masters[name], result.params[name]
                assert torch.equal(scale, scale_for(master, dtype=E4M3))
                error = (param.float() * scale - master).abs()
                assert bool((error <= (master.abs() / 16).clamp(min=scale * 2.0**-10)).all())

    def test_scales_are_kept_when_continued(self, make_scenario):
        """Scales are state: that of a frozen param does not follow from its master."""
        freeze = (FreezeSpec(param="0.up.weight", start=0, stop=9),)
        scenario = make_scenario("fp8", freeze=freeze, optim=SGD)
        one, two = (Reference(scenario, workload=build_workload(scenario)) for _ in range(2))
        one.step(), two.step()
        two.continue_as(scenario)
        left, right = one.step(), two.step()
        for name in left.scales:
            assert torch.equal(left.scales[name], right.scales[name])
            assert torch.equal(left.masters[name], right.masters[name])
