"""The built site: no warning, no broken link, no missing picture, and a search that finds."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from built_site import Site
from fences import ROOT


class Page(HTMLParser):
    """Links, pictures and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.pictures: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag in ("a", "link") and "href" in given:
            self.links.append(given["href"])
        if tag in ("img", "script") and "src" in given:
            self.pictures.append(given["src"])


@pytest.fixture(scope="module")
def pages(site: Site) -> dict[Path, Page]:
    """All pages but that for a missing one, whose links start at the server's root."""
    found = {path: Page(path) for path in site.folder.rglob("*.html") if path.name != "404.html"}
    assert len(found) > 20
    return found


def targets(path: Path, page: Page) -> Iterator[tuple[str, Path, str]]:
    """Each internal link of a page with the file and the anchor that it leads to."""
    for link in [*page.links, *page.pictures]:
        address, anchor = urldefrag(link)
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        yield link, target / "index.html" if target.is_dir() else target, unquote(anchor)


def test_builds_without_a_warning(site: Site) -> None:
    assert site.code == 0, site.log
    assert "WARNING" not in site.log
    assert "ERROR" not in site.log


def test_no_link_is_broken(site: Site, pages: dict[Path, Page]) -> None:
    files = {path.resolve(): page for path, page in pages.items()}
    broken = []
    for path, page in pages.items():
        for link, target, anchor in targets(path, page):
            known = target.is_file() and (
                target.suffix != ".html" or anchor in files[target.resolve()].anchors
            )
            if not known:
                broken.append(f"{path.relative_to(site.folder)}: {link}")
    assert not broken


def test_the_link_test_finds_what_is_broken(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "index.html").write_text('<h2 id="there">')
    a = tmp_path / "a.html"
    a.write_text('<a href="b/#there"><a href="b/#gone"><a href="c.html"><img src="d.svg">')
    found = {
        link: (target.is_file(), target.is_file() and anchor in Page(target).anchors)
        for link, target, anchor in targets(a, Page(a))
    }
    assert found == {
        "b/#there": (True, True),
        "b/#gone": (True, False),
        "c.html": (False, False),
        "d.svg": (False, False),
    }


def test_nothing_is_loaded_from_another_host(site: Site, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        text = path.read_text(encoding="utf-8")
        loaded = [src for src in page.pictures if urlsplit(src).netloc]
        loaded += re.findall(r'<link[^>]+rel="(?:stylesheet|preconnect)"[^>]+//[^>]+>', text)
        assert not loaded, path


def test_every_page_shows_its_source(site: Site, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        sources = [target for link, target, _ in targets(path, page) if "sources/" in link]
        assert sources, path
        assert all(source.read_text(encoding="utf-8").strip() for source in sources)


def test_figures_have_pictures(site: Site) -> None:
    page = Page(site.folder / "concepts" / "decentralized" / "index.html")
    assert len([src for src in page.pictures if src.endswith(".svg")]) == 5


def test_what_is_extracted_by_lines_is_what_is_meant(site: Site) -> None:
    text = (site.folder / "sources" / "guides" / "kernel.md.txt").read_text(encoding="utf-8")
    assert 'kernels/swiglu.py:-2:"' in text
    lines = (ROOT / "kernels" / "swiglu.py").read_text(encoding="utf-8").splitlines()[-2:]
    assert ["= Operation(" in line for line in lines] == [True, True]


def test_formulas_are_shown_without_a_script(site: Site) -> None:
    text = (site.folder / "concepts" / "decentralized" / "index.html").read_text(encoding="utf-8")
    assert text.count("<math ") > 30
    assert "arithmatex" not in text


@pytest.fixture(scope="module")
def index(site: Site) -> list[dict[str, Any]]:
    """What the search looks through: a location, a title and a text for each section."""
    text = (site.folder / "search" / "search_index.json").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = json.loads(text)["docs"]
    return found


@pytest.mark.parametrize(
    ("words", "location"),
    [
        ("one_peer_exponential", "concepts/decentralized/#topologies"),
        ("micro_batch_size", "concepts/update/#2-forward-and-backward"),
        ("TRITON_CACHE_DIR", "guides/caches/"),
        ("ThroughputWindows", "reference/callbacks/#tinyllm.callbacks.ThroughputWindows"),
        ("--trainer.max_steps", "reference/commands/#fit"),
        ("residual_rms_norm", "reference/kernels/#tinyllm.kernels.norm.residual_rms_norm"),
    ],
)
def test_search_finds(index: list[dict[str, Any]], words: str, location: str) -> None:
    found = [d["location"] for d in index if words in d["title"] or words in d["text"]]
    assert location in found


def test_public_names_are_in_the_reference(pages: dict[Path, Page]) -> None:
    import tinyllm
    import tinyllm.acceptance
    import tinyllm.callbacks
    import tinyllm.strategies

    anchors = set().union(*(page.anchors for page in pages.values()))
    layers = (tinyllm, tinyllm.acceptance, tinyllm.callbacks, tinyllm.strategies)
    names = {f"{layer.__name__}.{name}" for layer in layers for name in layer.__all__}
    assert not names - anchors
