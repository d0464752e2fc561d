"""The README is also shown by package indexes, where links relative to the repository do not work."""

import math
import re
from pathlib import Path

import pytest

from flashlatte.bench.results import newest_runs, read_lines

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


RUNS = newest_runs(read_lines([ROOT / "benchmarks/results/flashmla_in_turns.jsonl"]))


def quoted(run):
    ratios = [case["ratio"] for case in run]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"in {sum(ratio > 1 for ratio in ratios)} of {len(ratios)} cases, {mean:.3f} ×"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/guide/benchmarks.md", "docs/guide/flashmla.md"])
def test_figures_against_flashmla_are_those_of_the_newest_run(page):
    assert quoted(RUNS[-1]) in " ".join((ROOT / page).read_text().split())


@pytest.mark.parametrize("page", ["README.md", "docs/guide/benchmarks.md"])
def test_commits_are_those_of_the_newest_run(page):
    case = RUNS[-1][0]
    assert f"FlashLatte {case['commit']}, FlashMLA {case['flashmla_commit']}" in " ".join(
        (ROOT / page).read_text().split()
    )


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run[0]["device"])
def test_each_gpu_has_a_table_against_flashmla_with_its_newest_run(run):
    text = (ROOT / "docs" / "guide" / "benchmarks.md").read_text()
    section = text.split("## FlashMLA and FlashLatte, alternating")[1].split("\n## ")[0]
    tables = [
        [tuple(cell.strip().replace(",", "") for cell in row.split("|")[2:5]) for row in table.splitlines()[2:]]
        for table in re.findall(r"(?m)(?:^\| case \|.*\n(?:\|.*\n)+)", section)
    ]
    assert [
        (f"{case['flashmla_us']:.1f}", f"{case['flashlatte_us']:.1f}", f"{case['ratio']:.2f}") for case in run
    ] in tables
    assert quoted(run) in " ".join(section.split())
