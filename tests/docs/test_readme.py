"""The README is also shown by package indexes, where links relative to the repository do not work."""

import json
import math
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOME = r"https://(?:raw\.githubusercontent\.com/flashlatte/flashlatte/|github\.com/flashlatte/flashlatte/(?:blob|tree)/)main/"
LINKS = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())


def test_links_are_absolute():
    assert LINKS
    assert [link for link in LINKS if not link.startswith("https://")] == []


@pytest.mark.parametrize("link", LINKS)
def test_links_lead_to_files_of_the_repository(link):
    path = re.sub(HOME, "", link).partition("#")[0]
    assert path != link, "a link that leads out of the repository"
    assert (ROOT / path).exists()


CASES = [json.loads(line) for line in (ROOT / "benchmarks/results/flashmla_in_turns.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/guide/benchmarks.md", "docs/guide/flashmla.md"])
def test_figures_against_flashmla_are_those_recorded(page):
    ratios = [case["ratio"] for case in CASES]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    text = " ".join((ROOT / page).read_text().split())
    assert f"in {sum(ratio > 1 for ratio in ratios)} of {len(ratios)} cases, {mean:.3f} ×" in text


@pytest.mark.parametrize("page", ["README.md", "docs/guide/benchmarks.md"])
def test_commits_are_those_recorded(page):
    text = " ".join((ROOT / page).read_text().split())
    for case in CASES:
        assert f"FlashLatte {case['commit']}, FlashMLA {case['flashmla_commit']}" in text


def test_table_against_flashmla_has_the_lines_recorded():
    text = (ROOT / "docs" / "guide" / "benchmarks.md").read_text()
    rows = (
        text.split("## FlashMLA and FlashLatte, alternating")[1].split("| case |")[1].split("\n\n")[0].splitlines()[2:]
    )
    figures = [tuple(float(cell.replace(",", "")) for cell in row.split("|")[2:5]) for row in rows]
    assert figures == [(case["flashmla_us"], case["flashlatte_us"], case["ratio"]) for case in CASES]
