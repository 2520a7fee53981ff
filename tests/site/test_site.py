"""The site: every page in a browser, links, search, and up-to-date pictures."""

import functools
import http.server
import importlib.util
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from tests.browser import BROWSER, TOO_WIDE, open_browser

ROOT = Path(__file__).resolve().parents[2]
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium here")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Folder of the built site."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    quiet = {"DISABLE_MKDOCS_2_WARNING": "true", "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT, check=True, env={**os.environ, **quiet},
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def served(site):
    """Local address of the site, served because pages opened as files cannot read the index."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


def pages_of(site):
    return sorted(path.relative_to(site) for path in site.rglob("*.html"))


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_no_page_scrolls_sideways(site, served, page, width):
    wide = []
    for path in pages_of(site):
        page.open(f"{served}/{path}", width=width)
        if page.value(TOO_WIDE):
            wide.append(str(path))
    assert wide == []


@needs_browser
def test_dark_mode_follows_the_reader(served, page):
    colours = []
    for scheme in ("light", "dark"):
        page.open(f"{served}/index.html", width=1280, scheme=scheme)
        colours.append(page.value("getComputedStyle(document.body).backgroundColor"))
    assert len(set(colours)) == 2


@needs_browser
def test_search_finds_a_field_of_scenarios(served, page):
    page.open(f"{served}/index.html?q=bucket_elems", width=1280)
    found = """new Promise(done => {
      const look = () => {
        const first = document.querySelector(".md-search-result__link");
        first ? done(first.href) : setTimeout(look, 50);
      };
      look();
    })"""
    result = page.ask("Runtime.evaluate", expression=found, awaitPromise=True)
    assert ".html" in result["result"]["value"]


def test_no_link_is_broken(site):
    broken = []
    for path in pages_of(site):
        text = (site / path).read_text()
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            target, _ = urldefrag(unquote(link))
            if re.match(r"[a-z]+:|//|/|\?|$", target):
                continue
            if not (site / path.parent / target).exists():
                broken.append(f"{path}: {link}")
    assert broken == []


def test_pages_load_from_no_other_host(site):
    foreign = {
        address
        for path in pages_of(site)
        for address in re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"',
                                  (site / path).read_text())
    }  # fmt: skip
    assert foreign == set()


def test_each_known_divergence_has_a_page(site):
    names = {path.stem for path in (ROOT / "scenarios/upstream").glob("*.md")} - {"README"}
    assert names == {path.stem for path in (site / "gallery").glob("*.html")} - {"index"}


def test_divergence_page_shows_its_finding(site):
    cases = sorted((ROOT / "scenarios/upstream").glob("torch-*.toml"))
    assert len(cases) > 5
    for case in cases:
        page = (site / "gallery" / f"{case.stem}.html").read_text()
        check = re.search(r'finding = "([^"]+)"', case.read_text())[1]
        assert f'<a href="../reference/checks.html#{check.replace(".", "")}">{check}</a>' in page


def test_walkthroughs_are_listed_and_have_all_their_steps(site):
    index = (site / "walkthrough/index.html").read_text()
    for name, count in re.findall(r'<a href="(\w+)\.html">[^<]+</a>, (\d+) steps', index):
        page = (site / "walkthrough" / f"{name}.html").read_text()
        assert page.count('<section class="walk">') == int(count) > 9
    assert len(list((site / "walkthrough").glob("*.html"))) == 4


def _pictures():
    path = ROOT / "docs" / "site" / "pictures.py"
    spec = importlib.util.spec_from_file_location("pictures", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _without_marks(picture):
    """Return a picture without its marks of differing elements, which depend on kernels."""
    return re.sub(r'<rect [^>]+class="(?:veil|differs)">.*?</rect>', "", picture)


@pytest.mark.parametrize("name", ["ranks.svg", "finding.svg"])
def test_pictures_are_up_to_date(name):
    module = _pictures()
    drawn, kept = module.PICTURES[name](), (module.FOLDER / name).read_text()
    assert _without_marks(drawn) == _without_marks(kept)
    assert ('class="differs"' in drawn) == ('class="differs"' in kept)
