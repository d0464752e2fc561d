"""Processes that share the GPU: every kernel matches the reference, bitwise reproducibly."""

from __future__ import annotations

import pytest

from flashlatte.bench.shared import command, processes
from flashlatte.bench.shared.options import SharedGpuOptions

pytestmark = pytest.mark.gpu


def test_processes_that_share_the_gpu_get_right_and_equal_results() -> None:
    """The short form of ``flashlatte bench shared-gpu --random``."""
    options = SharedGpuOptions(processes=8, seconds=60.0, each=command.SECONDS_OF_A_RANDOM_CASE, random=True)
    lines = processes.run(options, command.show_faults)
    assert [(line["problem"], line["faults"]) for line in lines if line["faults"]] == []
    assert {line["op"] for line in lines if line["calls"]} == set(options.labels())
