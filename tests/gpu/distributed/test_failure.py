"""A rank that fails while the others' GPUs wait for it: every process ends by itself, and says which rank and why."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[2]
RANKS = 2
# From the first process's start to the last one's end; what hangs is waited for 10 minutes by NCCL, or for ever.
SECONDS = 45

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < RANKS or "RANK" in os.environ, reason="needs 2 GPUs, and starts processes itself"
    ),
]


@contextlib.contextmanager
def started(arguments: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are ranks of one group, without a launcher that would end those that another leaves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    path = {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(TESTS.parent), str(TESTS)])}
    processes = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "support" / "failing_rank.py"), *arguments],
            env=os.environ | shared | path | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
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
def test_every_rank_ends_and_says_why(rank, at_step, context_parallel, graphs):
    with started([str(number) for number in (rank, at_step, context_parallel, graphs)]) as processes:
        said = [process.communicate(timeout=SECONDS)[1] for process in processes]
    assert all(process.returncode for process in processes)
    other = 1 - rank
    assert "ValueError: this rank has no memory left" in said[rank]
    assert f"rank {rank} failed, and so rank {other} ends: ValueError: this rank has no memory left" in said[other]
