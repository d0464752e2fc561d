"""The README is also what a package index shows, where a path that is relative to the repository leads nowhere."""

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
def test_what_a_link_names_is_in_the_repository(link):
    path = re.sub(HOME, "", link).partition("#")[0]
    assert path != link, "a link that leads out of the repository"
    assert (ROOT / path).exists()


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/guide/benchmarks.md"])
def test_figures_beside_flashmla_are_those_recorded(page):
    lines = (ROOT / "benchmarks" / "flashmla_in_turns.jsonl").read_text().splitlines()
    ratios = [json.loads(line)["ratio"] for line in lines]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    text = " ".join((ROOT / page).read_text().split())
    assert f"{mean:.3f}" in text
    assert f"{len(ratios)} cases" in text
    assert re.search(rf"\b{sum(ratio > 1 for ratio in ratios)} (of them|are) ahead", text)
