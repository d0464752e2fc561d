"""``--progress``: one line with the number of finished tests, instead of a character for each."""

from __future__ import annotations

import sys

import pytest

# If the output is not a terminal, one line per this many percent.
STEP = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--progress", action="store_true", help="one line of progress instead of a dot for each test")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--progress") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress())


class Progress:
    def __init__(self) -> None:
        self.total = self.done = self.failed = self.said = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total = self.total or len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.total = len(ids)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        return ("passed" if report.when == "call" else "", "", "") if report.passed else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed += report.failed
        if report.when != "teardown" or not self.total:
            return
        self.done += 1
        share = 100 * self.done // self.total
        line = f"{self.done} of {self.total} tests, {share} %" + (f", {self.failed} failed" if self.failed else "")
        if sys.stdout.isatty():
            sys.stdout.write(f"\r{line}" + ("\n" if self.done == self.total else ""))
        elif share >= self.said + STEP or self.done == self.total:
            self.said = share
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
