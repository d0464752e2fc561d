"""Every Python snippet of the README and of the documentation runs; the snippets of a page share their names."""

import re
from pathlib import Path

import pytest
import torch.distributed as dist

from flashlatte.runtime import dispatch, repeat

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(<!-- needs a GPU -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def snippets(page: Path) -> list[tuple[str, bool]]:
    """The page's Python snippets, preceded by blank lines so that line numbers are those of the page."""
    text = page.read_text()
    found = []
    for fence in FENCE.finditer(text):
        if fence.group(2) == "python":
            found.append(("\n" * text.count("\n", 0, fence.start(3)) + fence.group(3), bool(fence.group(1))))
    return found


def pages() -> list:
    params = []
    for page in PAGES:
        found = snippets(page)
        if found:
            marks = [pytest.mark.gpu] if any(on_gpu for _, on_gpu in found) else []
            params.append(pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks))
    return params


@pytest.fixture
def registered_for_a_while():
    """Undoes registrations made by a page; its imports stay."""
    yield
    for implementations in dispatch._REGISTRY.values():
        for name in set(implementations) - set(dispatch.BACKENDS):
            del implementations[name]
    repeat.forget()


@pytest.mark.usefixtures("registered_for_a_while")
@pytest.mark.parametrize("page", pages())
def test_the_snippets_of_a_page_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for code, _ in snippets(page):
        exec(compile(code, str(page), "exec"), names)
    assert not dist.is_available() or not dist.is_initialized()  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_lines_fit_the_site(page):
    """A code block has room for 120 characters in a window of 1,400 px (docs/css/site.css)."""
    blocks = [fence.group(3) for fence in FENCE.finditer(page.read_text())]
    assert [line for block in blocks for line in block.splitlines() if len(line) > 120] == []


def test_the_collector_finds_snippets():
    assert len(snippets(ROOT / "docs" / "guide" / "cache-formats.md")) == 6
    assert snippets(ROOT / "docs" / "guide" / "cuda-graphs.md")[0][1]
