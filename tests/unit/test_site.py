"""The site of docs/ builds from a clean copy without a warning, and its links lead somewhere.

Sphinx itself warns about links between pages, headings and pages that no toctree has. It
does not check links that autodoc and docutils write into the HTML; this module follows them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.support.mpirun import REPOSITORY

HAS_SPHINX = all(importlib.util.find_spec(name) for name in ("sphinx", "myst_parser", "furo"))
"""Where tests may not be skipped for what is missing, they fail."""
pytestmark = pytest.mark.skipif(
    not HAS_SPHINX and not os.environ.get("PSDIST_REQUIRE_MPI"),
    reason="the extra docs is not installed: pip install 'psdist-mpi[docs]'",
)


class Links(HTMLParser):
    """The links of a page, and what it has that a link can lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            if value and (tag, name) in {("a", "href"), ("img", "src")}:
                self.links.append(value)


def broken_links(folder: Path) -> list[str]:
    """Return "page: link" of each internal link of a site that leads nowhere."""
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            if link.startswith(("http:", "https:", "mailto:", "data:")):
                continue
            name, _, anchor = unquote(link).partition("#")
            target = (path.parent / name).resolve() if name else path
            if not target.exists() or (
                anchor and target in pages and anchor not in pages[target].anchors
            ):
                broken.append(f"{path.relative_to(folder)}: {link}")
    return broken


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors from what git would give a fresh clone."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    )  # fmt: skip
    source = tmp_path_factory.mktemp("clone")
    for name in filter(None, listed.stdout.split("\0")):
        # Pages link to scripts outside docs/, so Sphinx must find them.
        if (REPOSITORY / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, source / name, follow_symlinks=False)
    built = tmp_path_factory.mktemp("site")
    words = ["-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", str(built)]
    done = subprocess.run(
        [sys.executable, *words], cwd=source, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return built


def text_of(site: Path, page: str) -> str:
    return (site / page).read_text(encoding="utf-8")


def test_every_link_of_the_site_leads_to_a_page_and_an_anchor(site: Path) -> None:
    assert broken_links(site) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<p id="here"><a href="#here">1</a><a href="b.html">2</a>')
    assert broken_links(tmp_path) == ["a.html: b.html"]
    (tmp_path / "b.html").write_text('<a href="a.html#there">3</a>')
    assert broken_links(tmp_path) == ["b.html: a.html#there"]


def test_the_api_page_has_every_public_name(site: Path) -> None:
    import psdist

    page = Links(text_of(site, "reference/api.html"))
    missing = {f"psdist.{name}" for name in psdist.__all__ if name != "__version__"} - page.anchors
    assert not missing
    members = {name for name in vars(psdist.Job) if not name.startswith("_")} - {"finish"}
    assert {f"psdist.Job.{name}" for name in members} - page.anchors == set()


def test_the_page_of_commands_has_every_command(site: Path) -> None:
    page = text_of(site, "reference/cli.html")
    for command in ("psdist run", "psdist check", "psdist checkpoint list", "psdist bench step"):
        assert f"Usage: {command}" in page


def test_the_notebook_is_a_page_with_its_picture(site: Path) -> None:
    page = text_of(site, "tutorials/staleness.html")
    assert "at most 3 behind" in page
    assert 'src="data:image/png;base64,' in page
