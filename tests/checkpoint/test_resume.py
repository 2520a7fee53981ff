"""Saving, loading into another layout and training on equals training without a stop."""

from __future__ import annotations

import pytest
import torch

from zero_sim.zero import StepSeams
from zero_sim.zero.variants.scaler import LossScaler

FORMS = ("sharded", "consolidated")
LAYOUTS = (
    (1, {"stage": 0}),
    (2, {"stage": 0, "bucket_elems": 4}),
    (1, {}),
    (3, {"bucket_elems": 1, "align_elems": 4}),
    (4, {"redundancy": 2, "param_order": "reverse"}),
    (5, {"partition": "uneven", "bucket_elems": 9}),
    (12, {"bucket_elems": 16}),
    (64, {"align_elems": 2}),
)


@pytest.fixture
def resume(run_ranks, kit, tmp_path):
    """Train, save and load elsewhere; return the resumed facts and the expected ones.

    The loading run has trained for `already` steps of its own.
    """

    def go(source, target, *, form="sharded", before=2, after=2, already=0, **options):
        path = tmp_path / "checkpoint"

        def first(rank):
            run = kit.build(**source[1], **options).train(before)
            kit.save(path, run, form=form)

        def second(rank):
            run = kit.build(**target[1], **options).train(already)
            return kit.load(path, run, steps_done=before).train(after).facts()

        def unbroken(rank):
            return kit.build(**options).train(before + after).facts()

        run_ranks(source[0], first)
        return run_ranks(target[0], second), run_ranks(1, unbroken)

    return go


class TestLayouts:
    """Names and spans mean the same in every layout."""

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("index", range(len(LAYOUTS)))
    def test_load_into_another_layout(self, resume, kit, form, index):
        """World size, redundancy, stage, buckets, alignment, partition and order all change."""
        source, target = LAYOUTS[index], LAYOUTS[(index * 3 + 4) % len(LAYOUTS)]
        kit.assert_same_runs(*resume(source, target, form=form))

    def test_more_than_ten_ranks_keep_their_order(self, resume, kit, tmp_path):
        """File names sort by rank, although no load depends on it."""
        kit.assert_same_runs(*resume((12, {}), (11, {"bucket_elems": 3})))
        names = sorted(path.name for path in (tmp_path / "checkpoint").glob("rank-*"))
        assert names == [f"rank-{rank:05d}-of-00012.safetensors" for rank in range(len(names))]

    @pytest.mark.parametrize("optimizer", ["adamw", "adagrad"])
    @pytest.mark.parametrize("steps", [{"before": 0}, {"after": 0}], ids=str)
    def test_resume_without_a_step_before_or_after(self, resume, kit, steps, optimizer):
        """A fresh run is a checkpoint too; Adagrad's sum then has its initial value."""
        kit.assert_same_runs(*resume((2, {}), (3, {}), optimizer=optimizer, **steps))

    def test_pending_gathers_finish_before_save_and_load(self, resume, kit):
        layout = {"overlap_params": True, "bucket_elems": 4}
        kit.assert_same_runs(*resume((4, layout), (3, layout)))


class TestOptimizers:
    """State is created as torch would have created it."""

    @pytest.mark.parametrize(
        "optimizer", ["adamw", "sgd", "plain-sgd", "adagrad", "nadam", "asgd", "rprop"]
    )
    @pytest.mark.parametrize("form", ["sharded", "consolidated"])
    def test_all_state_is_resumed(self, resume, kit, optimizer, form):
        """Elementwise tensors by span, 0D tensors once per param, in torch's order."""
        case = ((3, {"bucket_elems": 9}), (4, {"redundancy": 2}))
        kit.assert_same_runs(*resume(*case, optimizer=optimizer, form=form))

    @pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adagrad", "nadam"])
    def test_loaded_state_equals_saved_state(self, run_ranks, kit, tmp_path, optimizer):
        """Keys, dtypes, devices and shapes are those of an uninterrupted run."""

        def program(rank):
            run = kit.build(optimizer=optimizer).train(2)
            kit.save(tmp_path / "c", run)
            other = kit.load(tmp_path / "c", kit.build(optimizer=optimizer))
            return run.facts(), other.facts()

        for (owned, whole), (loaded, loaded_whole) in run_ranks(3, program):
            assert owned.keys() == loaded.keys()
            assert all(kit.same(owned[where], loaded[where]) for where in owned)
            assert kit.same(whole, loaded_whole)

    def test_load_removes_state_that_the_checkpoint_lacks(self, resume, kit):
        """The next step is then a first step."""
        kit.assert_same_runs(*resume((2, {}), (3, {}), before=0, already=3))

    def test_param_frozen_before_the_save_loads_without_state(self, run_ranks, kit, tmp_path):
        """It gets state in its first step, here after the load."""

        def train(steps, freeze):
            def program(rank):
                run = kit.build()
                if freeze == "save":
                    run.module.other.requires_grad_(False)
                    kit.save(tmp_path / "c", run.train(steps))
                    return None
                kit.load(tmp_path / "c", run, steps_done=2)
                return [set(f.state) for f in run.optimizer.fragments() if f.param == "other"]

            return program

        run_ranks(2, train(2, "save"))
        assert all(keys == set() for rank in run_ranks(3, train(0, "load")) for keys in rank)


def two_groups(decay_first):
    """Return two param groups, in an order that depends on the argument."""
    settings = [{"lr": 0.05, "weight_decay": 0.5}, {"lr": 0.01, "weight_decay": 0.0}]
    if not decay_first:
        settings.reverse()

    def factory(groups):
        groups = [group | settings[group["group_index"]] for group in groups]
        return torch.optim.AdamW(groups, foreach=False)

    def group_of(name):
        return int(name.startswith("weights") != decay_first)

    return {"optimizer": factory, "wrap": {"group_of": group_of}}


class TestGroups:
    """Settings belong to params, not to group indices."""

    @pytest.mark.parametrize("decay_first", [True, False])
    def test_settings_follow_params_into_another_group_order(
        self, run_ranks, kit, tmp_path, decay_first
    ):
        def first(rank):
            run = kit.build(**two_groups(decay_first)).train(2)
            run.optimizer.set_lr_factor(0.5)
            kit.save(tmp_path / "c", run)
            return run.train(2).facts()

        def second(rank):
            run = kit.load(tmp_path / "c", kit.build(**two_groups(not decay_first)), steps_done=2)
            return run.train(2).facts()

        unbroken = run_ranks(2, first)
        kit.assert_same_runs(run_ranks(3, second), unbroken)

    def test_settings_and_base_rates_are_loaded(self, run_ranks, kit, tmp_path):
        """Also on a rank that owns nothing of a group; `foreach` stays the run's own."""

        def first(rank):
            run = kit.build(**two_groups(True))
            run.optimizer.set_lr_factor(0.25)
            kit.save(tmp_path / "c", run)

        def second(rank):
            wrap = two_groups(False)["wrap"]
            run = kit.build(
                optimizer=lambda groups: torch.optim.AdamW(groups, lr=1.0, foreach=True), wrap=wrap
            )
            kit.load(tmp_path / "c", run)
            before = [(g["lr"], g["weight_decay"]) for g in run.optimizer.inner.param_groups]
            run.optimizer.set_lr_factor(1.0)
            after = [g["lr"] for g in run.optimizer.inner.param_groups]
            return before, after, {g["foreach"] for g in run.optimizer.inner.param_groups}

        run_ranks(2, first)
        for before, after, foreach in run_ranks(40, second):
            assert before == [(0.0025, 0.0), (0.0125, 0.5)]
            assert after == [0.01, 0.05]
            assert foreach == {True}

    def test_group_that_mixes_two_settings_is_refused(self, run_ranks, kit, tmp_path):
        """One group has one learning rate."""

        def program(rank):
            kit.save(tmp_path / "c", kit.build(**two_groups(True)))
            with pytest.raises(ValueError, match="different settings") as caught:
                kit.load(tmp_path / "c", kit.build(optimizer=torch.optim.AdamW))
            return str(caught.value)

        assert len(set(run_ranks(64, program))) == 1


class TestEverythingElse:
    """Data besides masters and optimizer state."""

    def test_loss_scaler_is_resumed(self, run_ranks, kit, tmp_path):
        def program(rank):
            scaler = LossScaler(scale=512.0, growth_interval=5, good_steps=3)
            kit.save(tmp_path / "c", kit.build(wrap={"seams": StepSeams(loss_scaler=scaler)}))
            other = kit.build(wrap={"seams": StepSeams(loss_scaler=LossScaler())})
            kit.load(tmp_path / "c", other)
            return other.optimizer.loss_scaler == scaler

        assert run_ranks(2, program) == [True, True]

    def test_weights_only_keeps_state_and_settings(self, run_ranks, kit, tmp_path):
        """Masters, params and buffers are loaded; state, settings and counters stay."""

        def program(rank):
            source = kit.build().train(3)
            kit.save(tmp_path / "c", source)
            run = kit.build(optimizer="sgd").train(1)
            owned, _ = run.facts()
            kit.load(tmp_path / "c", run, weights_only=True)
            loaded, whole = run.facts()
            wanted, wanted_whole = source.facts()
            momentum = "momentum_buffer"
            return (
                kit.same(whole, wanted_whole)
                and all(kit.same(loaded[w]["master"], wanted[w]["master"]) for w in wanted)
                and all(kit.same(loaded[w][momentum], owned[w][momentum]) for w in owned)
                and run.optimizer.inner.param_groups[0]["momentum"] == 0.9
            )

        assert run_ranks(3, program) == [True] * 3

    def test_bf16_params_resume_with_fp32_masters(self, resume, kit):
        """Masters are not rebuilt from rounded params."""
        kit.assert_same_runs(*resume((2, {}), (3, {}), dtype=torch.bfloat16))

    def test_buffers_that_are_not_persistent_are_not_loaded(self, run_ranks, kit, tmp_path):
        def program(rank):
            kit.save(tmp_path / "c", kit.build())
            run = kit.build()
            run.module.scratch += 7
            kit.load(tmp_path / "c", run)
            return run.module.scratch.tolist()

        assert run_ranks(2, program) == [[7.0, 7.0]] * 2
