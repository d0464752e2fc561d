"""A rank that fails while other ranks' GPUs wait for it: all processes raise an error with the rank and the reason.

A process whose GPU waits for another one ends only when it is killed, as launchers do, because CUDA waits for its
kernels.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[2]
RANKS = 2
# From the start of the first process to the last output; NCCL waits for a hanging rank for 10 minutes, or forever.
SECONDS = 45

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < RANKS or "RANK" in os.environ, reason="needs 2 GPUs, and starts processes itself"
    ),
]


@contextlib.contextmanager
def started(arguments: list[str], logs: list[Path]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of one group that write to the files ``logs``, without a launcher that kills them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    modules = {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(TESTS.parent), str(TESTS)])}
    processes = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "support" / "failing_rank.py"), *arguments],
            env=os.environ | shared | modules | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=path.open("wb"),
        )
        for rank, path in enumerate(logs)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("rank", "at_step", "context_parallel", "graphs"), [(1, 4, 1, 0), (1, 6, 2, 1), (0, 5, 1, 1)], ids=str
)
def test_every_rank_reports_the_reason(rank, at_step, context_parallel, graphs, tmp_path):
    logs, other = [tmp_path / str(number) for number in range(RANKS)], 1 - rank
    reason = "ValueError: this rank has no memory left"
    with started([str(number) for number in (rank, at_step, context_parallel, graphs)], logs) as processes:
        until = time.monotonic() + SECONDS
        while f"rank {rank} failed, therefore rank {other} stops: {reason}" not in logs[other].read_text():
            assert time.monotonic() < until, logs[other].read_text()
            time.sleep(0.2)
        assert processes[rank].wait(until - time.monotonic())
        assert reason in logs[rank].read_text()
        processes[other].terminate()
        assert processes[other].wait(10)
