"""Files read by GitHub, git and pre-commit: they parse, and match the Makefile and the package's metadata."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import flashlatte

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[0-9]-*.yml"))
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def read(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text())


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def jobs() -> list[Any]:
    return [
        pytest.param(job, id=f"{path.stem}-{name}") for path in WORKFLOWS for name, job in read(path)["jobs"].items()
    ]


def commands(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


@pytest.mark.parametrize("job", jobs())
def test_a_job_runs_targets_and_scripts_that_exist(job):
    text = commands(job)
    targets = re.findall(r"\bmake ([\w-]+)", text)
    scripts = re.findall(r"\.ci/[\w.]+", text)
    assert targets or scripts
    assert set(targets) <= TARGETS
    assert [script for script in scripts if not (ROOT / script).is_file()] == []
    assert job["timeout-minutes"] <= 240


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_the_repository(path):
    assert read(path)["permissions"] == {"contents": "read"}


def test_the_target_finder_finds_targets():
    assert {"test", "test-triton", "lint", "docs", "wheel", "gpu-test"} <= TARGETS


def test_the_tested_pythons_are_those_of_the_classifiers():
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert read(ROOT / ".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"] == classifiers


def test_the_tested_tritons_are_the_admitted_minor_versions():
    """One release of each minor version: one in constraints.txt, the others in the workflows."""
    low, high = re.findall(r'"triton>=3\.(\d+),.*<3\.(\d+);', (ROOT / "pyproject.toml").read_text())[0]
    others = read(ROOT / ".github/workflows/ci.yml")["jobs"]["triton"]["strategy"]["matrix"]["triton"]
    (pinned,) = re.findall(r"^triton==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    minors = sorted(int(version.split(".")[1]) for version in [*others, pinned])
    assert minors == list(range(int(low), int(high)))
    full = commands(read(ROOT / ".github/workflows/full.yml")["jobs"]["all"])
    assert re.findall(r"in ([\d. ]+);", full) == [" ".join(others)]


def test_the_gpu_job_is_off_by_default_and_never_runs_for_pull_requests():
    workflow = read(ROOT / ".github/workflows/gpu.yml")
    # YAML 1.1 reads the key "on" as true.
    assert set(workflow[True]) == {"push", "workflow_dispatch"}
    assert workflow["jobs"]["test"]["if"] == "github.event_name == 'workflow_dispatch' || vars.GPU_RUNNER == 'true'"
    assert "self-hosted" in workflow["jobs"]["test"]["runs-on"]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_an_issue_template_is_a_form(path):
    form = read(path)
    assert {"name", "description", "title", "labels", "body"} == set(form)
    identifiers = [field["id"] for field in form["body"]]
    assert len(set(identifiers)) == len(identifiers) > 0
    for field in form["body"]:
        assert field["type"] in ("textarea", "input", "dropdown")
        assert field["attributes"]["label"]


def test_there_is_a_template_for_each_kind_of_issue():
    assert [path.stem for path in TEMPLATES] == ["1-wrong-result", "2-slow", "3-crash", "4-feature", "5-gpu-report"]


def test_pre_commit_runs_the_pinned_ruff():
    hooks = read(ROOT / ".pre-commit-config.yaml")["repos"]
    (pinned,) = re.findall(r"^ruff==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert hooks[0]["rev"] == f"v{pinned}"
    (local,) = hooks[1]["hooks"]
    assert (ROOT / local["entry"].split()[1]).is_file()
    assert local["stages"] == ["commit-msg"]


def test_the_citation_is_of_the_packages_version():
    """The latest version with a date in the changelog, and that date."""
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == flashlatte.__version__
    dated = re.findall(r"^## \[([\d.]+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert dated[0] == (citation["version"], citation["date-released"])


@pytest.fixture(scope="module")
def commit_subject() -> ModuleType:
    return load(ROOT / ".ci" / "commit_subject.py")


@pytest.mark.parametrize(
    "subject",
    [
        "Fix race in index logits",
        "Pass page size to the builder",
        "Address review of the scheduler",
        'Revert "Rename pages."',
        "Merge branch 'main' into topic",
        "Say why a call of `topk` is refused: k above 4096",
        "X" * 72,
    ],
)
def test_commit_subjects_that_pass(commit_subject, subject):
    assert commit_subject.problems(subject) == []


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("Fix race in index logits.", "ends with a period"),
        ("fix race", "does not begin with a capital letter"),
        ("X" * 73, "has 73 characters"),
        ("", "does not begin with a capital letter"),
        ("Fixed race", "is not imperative: 'Fix', not 'Fixed'"),
        ("Adds a kernel", "is not imperative: 'Add'"),
        ("Copying pages", "is not imperative: 'Copy'"),
        ("Dropped a variant", "is not imperative: 'Drop'"),
        ("Simplifies the launcher", "is not imperative: 'Simplify'"),
        ("Tests: compare bits", "begins with a prefix, 'Tests'"),
    ],
)
def test_commit_subjects_that_do_not(commit_subject, subject, problem):
    (found,) = commit_subject.problems(subject)
    assert problem in found


def test_the_hook_reads_gits_message_file(tmp_path):
    script = ROOT / ".ci" / "commit_subject.py"
    message = tmp_path / "COMMIT_EDITMSG"
    for text, code in (("# a comment\n\nFix race\n\nThe reason.\n", 0), ("fixed race.\n", 1)):
        message.write_text(text)
        done = subprocess.run([sys.executable, str(script), str(message)], capture_output=True, text=True, check=False)
        assert (done.returncode, bool(done.stderr)) == (code, bool(code))


SUPPORT = ROOT / "tests" / "support"


def test_the_map_of_tests_support_has_every_module():
    listed = re.findall(r"^\| `(\w+)` \|", (SUPPORT / "README.md").read_text(), re.MULTILINE)
    modules = [*SUPPORT.glob("*.py"), *(package.parent for package in SUPPORT.glob("*/__init__.py"))]
    assert sorted(listed) == sorted(path.stem for path in modules)


@pytest.fixture(scope="module")
def quotes() -> ModuleType:
    return load(ROOT / ".ci" / "quotes.py")


def test_quoted_code_is_that_of_the_source(quotes, capsys):
    assert quotes.main(["--check"]) == 0, capsys.readouterr().out


def test_quotes_are_found_compared_and_rewritten(quotes):
    page = (
        "<!-- source: tests/support/marks.py mostly_full -->\n```py\nold\n```\n"
        "<!-- lines: Makefile -->\n```\nno line\n```\n"
    )
    differences: list[str] = []
    text = quotes.refreshed(page, differences.append)
    assert differences == ["tests/support/marks.py mostly_full", "Makefile does not contain the line 'no line'"]
    assert "```py\ndef mostly_full(" in text
    assert "no line" in text
    differences.clear()
    assert quotes.refreshed(text.replace("no line", "LISTED"), differences.append)
    assert differences == ["Makefile does not contain the line 'LISTED'"]


LISTED = ("*.md", "*.yml", "*.yaml", "*.toml", "*.cff", "hub/*", ".ci/*", ".github/**/*", "docs/**/*.md")


def test_no_path_of_a_machine_is_in_the_repositorys_own_files():
    files = {path for pattern in LISTED for path in ROOT.glob(pattern) if path.is_file()}
    assert len(files) > 40
    assert [path for path in files if re.search(r"(?<![\w/.])/(work|home|root|mnt)/\w", path.read_text())] == []
