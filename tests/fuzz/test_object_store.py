"""A folder in an object store is what the folder here is, after every batch."""

import json

import fsspec
import pytest
from click.testing import CliRunner

from zero_sim.cli.main import main
from zero_sim.errors import EnvironmentProblem, UsageError
from zero_sim.fuzz import campaign
from zero_sim.fuzz.object_store import folder_for, open_stored


@pytest.fixture
def url(request):
    """A folder in a store in memory, gone afterwards."""
    name = f"/{request.node.name}"
    store = fsspec.filesystem("memory")
    yield f"memory:/{name}"
    if store.exists(name):
        store.rm(name, recursive=True)


def stored_in(url):
    store, root = fsspec.core.url_to_fs(url)
    return {path.removeprefix(f"{root}/"): store.cat_file(path) for path in store.find(root)}


def opened(url, tmp_path, name="here"):
    return open_stored(url, here=tmp_path / name)


def test_what_changes_here_changes_there(url, tmp_path):
    stored = opened(url, tmp_path)
    folder = stored.here / "bundles" / "one"
    folder.mkdir(parents=True)
    (stored.here / "batches.jsonl").write_bytes(b"head\n")
    (folder / "case.toml").write_bytes(b"case")
    stored.send()
    assert stored_in(url) == {"batches.jsonl": b"head\n", "bundles/one/case.toml": b"case"}
    with (stored.here / "batches.jsonl").open("ab") as file:
        file.write(b"line\n")
    (folder / "case.toml").unlink()
    stored.send()
    assert stored_in(url) == {"batches.jsonl": b"head\nline\n"}


def test_another_machine_gets_the_same(url, tmp_path):
    one = opened(url, tmp_path, "one")
    one.here.mkdir()
    (one.here / "batches.jsonl").write_bytes(b"head\n")
    one.send()
    other = opened(url, tmp_path, "other")
    assert (other.here / "batches.jsonl").read_bytes() == b"head\n"


def test_what_others_wrote_stays(url, tmp_path):
    one, other = opened(url, tmp_path, "one"), opened(url, tmp_path, "other")
    for stored, name in ((one, "a"), (other, "b")):
        stored.here.mkdir()
        (stored.here / name).write_bytes(b"")
        stored.send()
    assert set(stored_in(url)) == {"a", "b"}


def test_only_what_changed_is_sent(url, tmp_path, monkeypatch):
    stored = opened(url, tmp_path)
    stored.here.mkdir()
    for name in "ab":
        (stored.here / name).write_bytes(b"1")
    stored.send()
    sent = []
    store = type(fsspec.filesystem("memory"))
    right = store.pipe_file

    def noted(self, path, value, **options):
        sent.append(path)
        return right(self, path, value, **options)

    monkeypatch.setattr(store, "pipe_file", noted)
    (stored.here / "b").write_bytes(b"22")
    stored.send()
    assert [path.rpartition("/")[2] for path in sent] == ["b"]


def test_what_could_not_be_sent_is_sent_the_next_time(url, tmp_path, monkeypatch):
    stored = opened(url, tmp_path)
    stored.here.mkdir()
    (stored.here / "a").write_bytes(b"1")
    store = type(fsspec.filesystem("memory"))

    def refuse(self, path, value, **options):
        raise PermissionError("not yours")

    with monkeypatch.context() as patch:
        patch.setattr(store, "pipe_file", refuse)
        with pytest.raises(EnvironmentProblem, match="PermissionError: not yours"):
            stored.send()
    stored.send()
    assert stored_in(url) == {"a": b"1"}


def test_a_folder_of_files_is_a_store_too(tmp_path):
    url = f"file://{tmp_path}/there/deep"
    stored = open_stored(url, here=tmp_path / "here")
    (tmp_path / "here" / "bundles").mkdir(parents=True)
    (tmp_path / "here" / "bundles" / "a").write_bytes(b"1")
    stored.send()
    assert (tmp_path / "there" / "deep" / "bundles" / "a").read_bytes() == b"1"


@pytest.mark.parametrize("name", ["../escaped", "a/../../escaped", "a\\b"])
def test_a_name_that_leads_elsewhere_is_refused(url, tmp_path, monkeypatch, name):
    store = type(fsspec.filesystem("memory"))
    root = fsspec.core.url_to_fs(url)[1]
    monkeypatch.setattr(store, "find", lambda self, path, **_: {f"{root}/{name}": {"size": 1}})
    with pytest.raises(UsageError, match="a file named"):
        opened(url, tmp_path)
    assert not (tmp_path / "escaped").exists()


def test_a_file_that_is_too_large_is_not_fetched(url, tmp_path, monkeypatch):
    store = type(fsspec.filesystem("memory"))
    root = fsspec.core.url_to_fs(url)[1]
    monkeypatch.setattr(store, "find", lambda self, path, **_: {f"{root}/a": {"size": 1 << 40}})
    with pytest.raises(UsageError, match=f"{1 << 40} bytes"):
        opened(url, tmp_path)


@pytest.mark.parametrize(
    ("url", "error"), [("nosuch://bucket", UsageError), ("oci://bucket/a", EnvironmentProblem)]
)
def test_a_store_that_nobody_knows_is_refused(url, error, tmp_path):
    with pytest.raises(error, match="expected"):
        open_stored(url, here=tmp_path)


def test_a_campaign_goes_on_from_a_store(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(campaign, "BATCH_CASES", 2)

    def fuzzed(cases):
        said = ["fuzz", "--cases", str(cases), "--jobs", "1", "--corpus", url, "--json"]
        result = CliRunner().invoke(main, said)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    first = fuzzed(2)
    assert (first["cases"], first["corpus"]) == (2, url)
    assert list(stored_in(url)) == ["batches-1-of-1.jsonl"]
    # As on another machine.
    (folder_for(url, within=tmp_path / ".zero-sim" / "stored") / "batches-1-of-1.jsonl").unlink()
    again = fuzzed(4)
    assert (again["cases"], again["earlier_cases"]) == (4, 2)


def test_a_store_that_refuses_ends_the_campaign_and_says_so(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(campaign, "BATCH_CASES", 2)

    def refuse(self, path, value, **options):
        raise PermissionError("not yours")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "pipe_file", refuse)
    said = ["fuzz", "--cases", "6", "--jobs", "1", "--corpus", url, "--json"]
    result = CliRunner().invoke(main, said)
    assert result.exit_code == 4, result.output
    assert "PermissionError: not yours" in result.stderr
    assert json.loads(result.stdout)["cases"] == 2
