"""Hostile checkpoints with valid checksums run no code and lead to no other file."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import socket
import stat

import pytest
import torch

from zero_sim.errors import CheckpointError

FORMS = ("sharded", "consolidated")


class Payload:
    """Object that makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def payloads(marker):
    """Yield pickles that execute code, bare in every protocol and in torch's container."""
    yield from (pickle.dumps(Payload(marker), protocol=protocol) for protocol in range(6))
    file = io.BytesIO()
    torch.save(Payload(marker), file)
    yield file.getvalue()


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Folder with a small checkpoint of each form."""
    return tmp_path_factory.mktemp("originals")


@pytest.fixture
def copy(originals, tmp_path, run_ranks, kit):
    """Return a fresh copy of a checkpoint, for altering."""

    def program(rank):
        run = kit.build().train(2)
        for form in FORMS:
            kit.save(originals / form, run, form=form)

    def go(form):
        path = tmp_path / form
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(originals / form, path)
        return path

    # Save here, because `go` may be called inside a rank.
    if not os.listdir(originals):
        run_ranks(2, program)
    return go


@pytest.fixture
def load_each(run_ranks, kit):
    """Load altered checkpoints into one run; return each refusal, or None."""

    def go(paths, **options):
        def program(rank):
            run, messages = kit.build(), []
            for path in paths:
                try:
                    kit.load(path, run, **options)
                    messages.append(None)
                except CheckpointError as error:
                    messages.append(str(error))
            return messages, run.facts()

        return run_ranks(1, program)[0]

    return go


class TestCode:
    """No load unpickles anything."""

    def test_payloads_run_when_unpickled(self, tmp_path):
        """Otherwise the other tests would prove nothing."""
        for index, payload in enumerate(payloads(tmp_path / "marker")):
            if index < 6:
                pickle.loads(payload)
            else:
                torch.load(io.BytesIO(payload), weights_only=False)
            (tmp_path / "marker").rmdir()

    @pytest.mark.parametrize("weights_only", [False, True])
    @pytest.mark.parametrize("form", FORMS)
    def test_pickle_in_place_of_a_file_is_refused(
        self, copy, load_each, kit, tmp_path, form, weights_only
    ):
        def alter():
            for name in sorted(os.listdir(copy(form))):
                for payload in payloads(tmp_path / "marker"):
                    path = copy(form)
                    (path / name).write_bytes(payload)
                    if name != "manifest.json":
                        kit.reseal(path)
                    yield path

        messages, _ = load_each(alter(), weights_only=weights_only)
        assert len(messages) >= 14
        assert all("expected" in message for message in messages)
        assert not (tmp_path / "marker").exists()


class TestPlaces:
    """Only regular files in the folder are read."""

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize(
        "kind", ["link", "dangling", "loop", "endless", "pipe", "socket", "folder"]
    )
    def test_irregular_file_is_refused(self, copy, load_each, tmp_path, monkeypatch, form, kind):
        """The message names its kind, and no load waits for it."""

        def alter():
            for name in sorted(os.listdir(copy(form))):
                path = copy(form)
                outside = tmp_path / "outside"
                shutil.copy(path / name, outside)
                (path / name).unlink()
                match kind:
                    case "link":
                        (path / name).symlink_to(outside)
                    case "dangling":
                        (path / name).symlink_to(tmp_path / "nothing")
                    case "loop":
                        (path / name).symlink_to(path / name)
                    case "endless":
                        (path / name).symlink_to("/dev/zero")
                    case "pipe":
                        os.mkfifo(path / name)
                    case "folder":
                        (path / name).mkdir()
                    case "socket":
                        # Names of sockets are limited to about 100 characters.
                        monkeypatch.chdir(path)
                        with socket.socket(socket.AF_UNIX) as bound:
                            bound.bind(name)
                yield path

        messages, _ = load_each(alter())
        word = kind if kind in ("pipe", "socket", "folder") else "link"
        assert messages
        for message in messages:
            assert f", got a {word}, not a regular file." in message

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("claim", ["less", "more", "sparse"])
    def test_wrong_file_size_is_refused(self, copy, load_each, kit, form, claim):
        """The check comes before any read."""

        def alter():
            content = json.loads((copy(form) / "manifest.json").read_text())["content"]
            for index, file in enumerate(content["files"]):
                path = copy(form)
                data = (path / file["name"]).read_bytes()
                if claim == "sparse":
                    os.truncate(path / file["name"], 1 << 40)
                    changed = content["files"][index] | {"size_bytes": 1 << 40}
                    files = [*content["files"][:index], changed, *content["files"][index + 1 :]]
                    kit.write_manifest(path, content | {"files": files})
                    yield path
                    os.truncate(path / file["name"], 0)
                    continue
                (path / file["name"]).write_bytes(data[:-1] if claim == "less" else data + b"\0")
                kit.reseal(path)
                yield path

        messages, _ = load_each(alter())
        for message in messages:
            assert "size_bytes" in message

    def test_endless_manifest_is_refused(self, copy, load_each):
        path = copy("sharded")
        os.truncate(path / "manifest.json", 1 << 40)
        (message,), _ = load_each([path])
        assert "expected at most 268435456 bytes" in message

    @pytest.mark.parametrize("form", FORMS)
    def test_foreign_file_name_in_manifest_is_refused(self, copy, load_each, kit, tmp_path, form):
        """Only names of this form are opened."""
        names = (
            "", ".", "..", "../x", "/etc/passwd", "sub/x", "a\0b", "a\nb", "\x1b[31m", "x" * 5000,
            "manifest.json", "rank-00000-of-00002.safetensors\n", "__0_0.distcp/../../x",
            "RANK-00000-OF-00002.SAFETENSORS",
            "rank-\u0660\u0660\u0660\u0660\u0660-of-00002.safetensors",
        )  # fmt: skip

        def alter():
            for name in names:
                path = copy(form)
                content = json.loads((path / "manifest.json").read_text())["content"]
                content["files"][-1]["name"] = name
                kit.write_manifest(path, content)
                yield path

        messages, _ = load_each(alter())
        for message in messages:
            assert "content.files[" in message
            assert message.isprintable()


def test_link_to_a_checkpoint_folder_is_followed(copy, load_each, tmp_path):
    """You name the folder yourself, often by a link such as `latest`."""
    (tmp_path / "latest").symlink_to(copy("sharded"))
    assert load_each([tmp_path / "latest"])[0] == [None]
    assert stat.S_ISLNK((tmp_path / "latest").lstat().st_mode)
