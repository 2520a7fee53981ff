"""A failed save or load is an error on every rank and changes nothing."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from zero_sim.checkpoint import tensorfile
from zero_sim.errors import CheckpointError
from zero_sim.zero import StepSeams
from zero_sim.zero.variants.scaler import LossScaler

RANKS = 3


@pytest.fixture
def path(tmp_path):
    """Path of a checkpoint."""
    return tmp_path / "checkpoint"


@pytest.fixture
def saved(run_ranks, kit, path):
    """Save a run after two steps; return the facts of its ranks."""

    def go(form="sharded", **options):
        def program(rank):
            run = kit.build(**options).train(2)
            kit.save(path, run, form=form)
            return run.facts()

        return run_ranks(RANKS, program)

    return go


@pytest.fixture
def save_refusal(run_ranks, kit, path):
    """Try to save a run after a step; return the message, which is equal on all ranks."""

    def go(*, module=None, change=lambda run, rank: None, form="sharded"):
        def program(rank):
            run = kit.build(module=module and module()).train(1)
            change(run, rank)
            with pytest.raises(CheckpointError) as caught:
                kit.save(path, run, form=form)
            return str(caught.value)

        messages = set(run_ranks(RANKS, program))
        assert len(messages) == 1
        return messages.pop()

    return go


@pytest.fixture
def refusal(run_ranks, kit, path):
    """Try to load into a trained run; return the message, which is equal on all ranks."""

    def go(*, build_module=None, **options):
        def program(rank):
            own = options if build_module is None else options | {"module": build_module()}
            run = kit.build(**own).train(1)
            before = run.facts()
            groups = [group.copy() for group in run.optimizer.inner.param_groups]
            with pytest.raises(CheckpointError) as caught:
                kit.load(path, run)
            after = run.facts()
            assert before[0].keys() == after[0].keys()
            assert all(kit.same(before[0][where], after[0][where]) for where in before[0])
            assert kit.same(before[1], after[1])
            for group, kept in zip(run.optimizer.inner.param_groups, groups, strict=True):
                assert all(group[key] is kept[key] for key in kept)
            return str(caught.value)

        messages = set(run_ranks(RANKS, program))
        assert len(messages) == 1
        return messages.pop()

    return go


@pytest.fixture
def break_sync(monkeypatch):
    """Fail with a full disk for file names that contain a given part."""

    def go(part):
        fsync = os.fsync

        def full(handle):
            if part in os.readlink(f"/proc/self/fd/{handle}").rsplit("/", 1)[-1]:
                raise OSError(errno.ENOSPC, "No space left on device")
            fsync(handle)

        monkeypatch.setattr(os, "fsync", full)

    return go


class TestSaving:
    """An error on one rank is raised on all, and the old checkpoint stays."""

    @pytest.mark.parametrize(
        ("form", "part"),
        [
            ("sharded", "rank-00001"),
            ("sharded", "module"),
            ("sharded", "manifest"),
            ("consolidated", "consolidated"),
            ("consolidated", "manifest"),
        ],
    )
    def test_full_disk_keeps_the_old_checkpoint(
        self, run_ranks, kit, saved, path, break_sync, form, part
    ):
        """Even if only one rank's file is affected."""
        expected = saved(form)
        break_sync(part)

        def program(rank):
            run = kit.build().train(3)
            with pytest.raises(CheckpointError, match="No space left on device") as caught:
                kit.save(path, run, form=form)
            other = kit.load(path, kit.build())
            return str(caught.value), other.facts()

        results = run_ranks(RANKS, program)
        assert len({message for message, _ in results}) == 1
        kit.assert_same_runs([facts for _, facts in results], expected)
        assert [entry.name for entry in path.parent.iterdir()] == ["checkpoint"]

    @pytest.mark.parametrize("nth", range(6))
    def test_write_that_fails_while_gathering_leaves_no_files(
        self, save_refusal, path, monkeypatch, nth
    ):
        """Rank 0 keeps receiving, so no rank waits for it."""
        count = [0]

        def write_bytes(file, data):
            count[0] += 1
            if count[0] > nth:
                raise OSError(errno.ENOSPC, "No space left on device")
            file.write(data)

        monkeypatch.setattr(tensorfile, "write_bytes", write_bytes)
        assert re.search("rank 0: OSError.*No space", save_refusal(form="consolidated"))
        assert not list(path.parent.iterdir())

    def test_folder_without_manifest_is_never_replaced(self, save_refusal, path):
        path.mkdir()
        (path / "thesis.tex").write_text("years of work")
        assert "has no manifest.json" in save_refusal()
        assert (path / "thesis.tex").read_text() == "years of work"

    def test_unknown_form_is_refused(self, save_refusal):
        assert "sharded, consolidated, got 'zip'" in save_refusal(form="zip")

    def test_state_of_another_shape_than_the_param_is_refused(self, save_refusal):
        """It cannot be cut into spans, and must not be dropped."""

        def change(run, rank):
            leaf = run.optimizer.inner.param_groups[0]["params"][0]
            run.optimizer.inner.state[leaf]["history"] = torch.zeros(2, 9)

        assert "'history' of shape (2, 9)" in save_refusal(change=change)

    def test_different_step_counts_of_one_param_are_refused(self, save_refusal, kit):
        """A checkpoint has one step count per param."""

        def change(run, rank):
            for state in run.optimizer.inner.state.values():
                state["step"] += rank

        said = save_refusal(module=lambda: kit.Model(((64,),)), change=change)
        assert "ranks 0 and 1, which own parts of" in said


class TestFiles:
    """Files are checked before any value is read."""

    def test_missing_checkpoint_is_refused(self, refusal, path):
        assert f"expected a checkpoint at {path}, got nothing" in refusal()

    def test_folder_without_manifest_is_refused(self, refusal, path):
        path.mkdir()
        assert "expected manifest.json" in refusal()

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda text: text[:-40], "the manifest: expected JSON"),
            (lambda text: text.replace('"version": 3', '"version": 99'), "expected version 3"),
            (lambda text: text.replace("zero_sim checkpoint", "other"), "got another file"),
            (lambda text: text.replace('"lr": 0.05', '"lr": 7.0'), "changed after it was written"),
        ],
        ids=["cut off", "version", "format", "edited"],
    )
    def test_damaged_manifest_is_refused(self, saved, refusal, path, change, said):
        saved()
        manifest = path / "manifest.json"
        before = manifest.read_text()
        manifest.write_text(change(before))
        assert manifest.read_text() != before
        assert said in refusal()

    @pytest.mark.parametrize("form", ["sharded", "consolidated"])
    @pytest.mark.parametrize("damage", ["truncated", "missing", "foreign", "one bit"])
    def test_damaged_file_is_refused_and_named(self, saved, refusal, path, form, damage):
        saved(form)
        names = [entry.name for entry in path.iterdir() if entry.name != "manifest.json"]
        assert names
        for name in names:
            file = path / name
            content = file.read_bytes()
            match damage:
                case "truncated":
                    file.write_bytes(content[:-1])
                    expected = f"{len(content)} bytes in {file}, got {len(content) - 1}"
                case "missing":
                    file.unlink()
                    expected = f"{len(content)} bytes from {file}"
                case "foreign":
                    file.write_bytes(bytes(len(content)))
                    expected = f"of {file}, got"
                case _:
                    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
                    expected = f"of {file}, got"
            assert expected in refusal()
            file.write_bytes(content)

    def test_all_missing_files_are_named(self, saved, refusal, path):
        saved()
        for file in path.glob("rank-*"):
            file.unlink()
        message = refusal()
        assert all(f"rank-0000{rank}-of" in message for rank in range(RANKS))


class TestFit:
    """All differences are listed at once."""

    def test_another_module_is_refused_with_all_differences(self, saved, refusal, kit):
        saved()

        def build_module():
            module = kit.Model(((3, 5), (8,), (), (0,), (1,), (2, 3, 2), (4,)))
            module.weights[4] = nn.Parameter(torch.zeros(1).bfloat16())
            module.frozen.requires_grad_(True)
            module.register_buffer("extra", torch.zeros(1))
            return module

        message = refusal(build_module=build_module)
        for line in (
            "trained param 'weights.1' has shape (7,), in the module (8,)",
            "trained param 'weights.4' has dtype float32, in the module bfloat16",
            "trained param 'weights.6' is in the module but not in the checkpoint",
            "trained param 'frozen' is in the module but not in the checkpoint",
            "frozen param 'frozen' is in the checkpoint but not in the module",
            "buffer 'extra' is in the module but not in the checkpoint",
        ):
            assert line in message
        assert "6 differences" in message

    def test_another_optimizer_is_refused(self, saved, refusal):
        saved()
        assert "is of AdamW, this run steps with SGD" in refusal(optimizer="sgd")

    def test_another_optimizer_class_of_the_same_name_is_refused(self, saved, refusal):
        """Its state has other keys."""
        saved()

        class AdamW(torch.optim.SGD):
            """Optimizer with the name of another one."""

        AdamW.__qualname__ = "AdamW"
        message = refusal(
            optimizer=lambda params: AdamW(params, lr=0.1, momentum=0.9), wrap={"elementwise": True}
        )
        assert "'exp_avg': 'float32'" in message
        assert "keeps {'momentum_buffer': 'float32'}" in message

    @pytest.mark.parametrize("was_scaled", [True, False])
    def test_loss_scaler_on_one_side_only_is_refused(self, saved, refusal, was_scaled):
        """A load neither invents nor drops it."""
        sides = [{"wrap": {"seams": StepSeams(loss_scaler=LossScaler())}}, {}]
        source, target = sides if was_scaled else sides[::-1]
        saved(**source)
        assert "a loss scaler" in refusal(**target)

    @pytest.mark.parametrize("change", ["drop", "repeat"])
    def test_gaps_and_overlaps_of_spans_are_refused(self, kit, saved, refusal, path, change):
        """The manifest alone shows them."""
        saved()

        def lose(content):
            lost = content["files"].pop()
            if change == "repeat":
                first = content["files"][0]
                content["files"].append(first | {"name": lost["name"]})
                (path / lost["name"]).write_bytes((path / first["name"]).read_bytes())

        kit.reseal(path, lose)
        message = refusal()
        assert "no span contains" in message
        assert ("two contain" in message) == (change == "repeat")


def test_safetensors_library_reads_a_consolidated_checkpoint(saved, path):
    from safetensors.torch import load_file

    saved("consolidated")
    tensors = load_file(path / "consolidated.safetensors")
    assert tensors["master/weights.0"].shape == (3, 5)
    assert tensors["state.exp_avg/weights.5"].shape == (2, 3, 2)
    assert tensors["master/weights.3"].shape == (0,)
    assert tensors["buffer/count"].item() == 2
    assert tensors["frozen/frozen"].shape == (2, 2)
    assert {path.name for path in Path(path).iterdir()} == {
        "manifest.json",
        "consolidated.safetensors",
    }
