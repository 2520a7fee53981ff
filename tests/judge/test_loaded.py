"""Wrong loads: the first finding names the wrong value, before the next forward."""

from dataclasses import replace

import pytest
import torch

from zero_sim.scenario.spec import (
    LossScaleSpec,
    ModelSpec,
    OptimizerSpec,
    ParamGroupSpec,
    ReloadSpec,
    RunSpec,
    SystemSpec,
)
from zero_sim.targets.own import ZeroSimEngine

CASE = {
    "run": RunSpec(steps=3),
    "reload": ReloadSpec(step=2, world_size=2),
    "optimizer": OptimizerSpec(loss_scale=LossScaleSpec(initial=8.0, growth_interval=100)),
}


def break_master(engine):
    engine._optimizer.masters[0].leaf.detach()[0] += 1


def break_lower_bits(engine):
    for master in engine._optimizer.masters:
        leaf = master.leaf.detach()
        leaf.copy_(leaf.to(master.param.dtype))


def break_state(key):
    def broken(engine):
        first = engine._optimizer.masters[0].leaf
        engine._optimizer.inner.state[first][key].view(-1)[0] += 1

    return broken


def break_missing_key(engine):
    for state in engine._optimizer.inner.state.values():
        del state["exp_avg_sq"]


def break_param(engine):
    engine.params()["0.up.bias"].view(-1)[3] += 1


def break_frozen(engine):
    engine.module.frozen[3] += 1


def break_lr(engine):
    engine._optimizer.base_lrs[0] *= 10


def break_betas(engine):
    engine._optimizer.inner.param_groups[0]["betas"] = (0.5, 0.5)


def break_scale(engine):
    engine._optimizer.loss_scaler.scale *= 2


def break_good_steps(engine):
    engine._optimizer.loss_scaler.good_steps = 0


@pytest.fixture
def after_load(monkeypatch):
    """Apply a change to rank 1's engine after its load."""

    def patch(act):
        load = ZeroSimEngine.load

        def wrong(self, path, **settings):
            load(self, path, **settings)
            if torch.distributed.get_rank() == 1:
                with torch.no_grad():
                    act(self)

        monkeypatch.setattr(ZeroSimEngine, "load", wrong)

    return patch


BREAKS = [
    (break_master, "the fp32 master differs from the checkpoint"),
    (
        break_lower_bits,
        "the fp32 master differs from the checkpoint: the value is the working param, without the "
        "lower bits",
    ),
    (break_state("exp_avg"), "optimizer state 'exp_avg' differs from the checkpoint"),
    (break_state("exp_avg_sq"), "optimizer state 'exp_avg_sq' differs from the checkpoint"),
    (break_state("step"), "optimizer state 'step' differs from the checkpoint"),
    (
        break_missing_key,
        "optimizer state 'exp_avg_sq' is missing in the system after the load",
    ),
    (break_param, "the working param differs from the checkpoint"),
    (
        break_lr,
        "the setting 'lr' differs from the checkpoint: expected 0.001, got 0.01",
    ),
    (
        break_betas,
        "the setting 'betas' differs from the checkpoint: expected (0.9, 0.999), got (0.5, 0.5)",
    ),
    (break_scale, "the loss scale differs from the checkpoint: expected 8.0, got 16.0"),
    (break_good_steps, "the count of good steps differs from the checkpoint: expected 2, got 0"),
]


@pytest.mark.parametrize(("act", "message"), BREAKS)
def test_wrong_value_is_the_first_finding(judged, after_load, act, message):
    after_load(act)
    result = judged(**CASE)
    first = result.findings[0]
    assert (first.check, first.phase, first.step, first.rank) == ("equality.load", "load", 2, 1)
    assert first.message.startswith(message), first.message
    # The finding comes before the first forward, so no step has issued a collective yet.
    log = result.logs[-1]
    assert not [c for c in log.collectives[: first.call_stop] if "reduce_scatter" in c.kind]


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("form", ["sharded", "consolidated"])
def test_right_load_has_no_finding(judged, form, weights_only):
    reload = replace(CASE["reload"], form=form, weights_only=weights_only)
    result = judged(**{**CASE, "reload": reload})
    assert (result.verdict, result.findings) == ("pass", ())


def test_param_and_element_are_named(judged, after_load):
    after_load(break_param)
    first = judged(**CASE).findings[0]
    assert (first.param, first.index, first.differ_count) == ("0.up.bias", (3,), 1)


def test_swapped_group_settings_are_found(judged, after_load):
    optimizer = OptimizerSpec(groups=(ParamGroupSpec(match="bias", lr=0.5),))
    assert judged(**{**CASE, "optimizer": optimizer}).verdict == "pass"
    after_load(lambda engine: engine._optimizer.base_lrs.reverse())
    result = judged(**{**CASE, "optimizer": optimizer})
    assert "the setting 'lr' differs from the checkpoint" in result.findings[0].message


@pytest.mark.parametrize("name", ["sgd", "nadam", "adadelta", "asgd", "rprop", "adagrad"])
def test_other_optimizers_resume(judged, name):
    assert judged(**{**CASE, "optimizer": OptimizerSpec(name=name)}).verdict == "pass"


def test_wrong_fp8_scale_is_found(judged, after_load):
    case = {**CASE, "model": ModelSpec(name="fp8", hidden=5), "optimizer": OptimizerSpec()}
    assert judged(**case).verdict == "pass"

    def broken(engine):
        name = next(iter(engine._ddp.cast.scales))
        engine._ddp.cast.scales[name] *= 2

    after_load(broken)
    first = judged(**case).findings[0]
    assert first.check == "equality.load"
    assert first.message.startswith("the scale of the fp8 param differs from the checkpoint")


def test_param_without_a_step_has_no_state(judged):
    result = judged(**{**CASE, "model": ModelSpec(name="unusual")}, system=SystemSpec())
    assert (result.verdict, result.findings) == ("pass", ())


def test_changed_frozen_param_is_found(judged, after_load):
    after_load(break_frozen)
    first = judged(**{**CASE, "model": ModelSpec(name="unusual")}).findings[0]
    assert (first.check, first.rank) == ("equality.load", 1)
    assert (first.param, first.offset_in_param) == ("frozen", 3)


def test_unreported_settings_are_noted(judged, monkeypatch):
    monkeypatch.delattr(ZeroSimEngine, "settings")
    result = judged(**CASE)
    assert result.verdict == "pass"
    assert any("settings of the optimizer after a load" in note for note in result.notes)


def test_changed_buffer_is_found(judged, after_load):
    case = {**CASE, "model": ModelSpec(name="mlp", dtype="bf16", hidden=5, buffer="saved")}
    assert judged(**case).verdict == "pass"
    after_load(lambda engine: engine.module.gain.mul_(2))
    first = judged(**case).findings[0]
    assert (first.check, first.param, first.rank) == ("equality.load", "gain", 1)
    assert first.message.startswith("the buffer of the module differs from the checkpoint")
