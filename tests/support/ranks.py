"""Processes of a gloo group that stay alive and run one function after another."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# One process imports torch, and the ranks are forked from it before it has a thread.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch.distributed",
        "transformers.models.deepseek_v3.modeling_deepseek_v3",
        "flashlatte.distributed",
        "support.rank_jobs",
        "support.rank_layer_jobs",
        "support.rank_engine_jobs",
        "support.rank_prefill_jobs",
        "support.rank_training_jobs",
    ]
)
_PATIENCE = 60
# A rank that another one ends does so within these seconds, not only at the timeout of its group.
SOON = _PATIENCE / 2


class Ranks:
    """``size`` processes whose default group contains all of them."""

    def __init__(self, size: int, timeout: float = _PATIENCE) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        pipes = [_CONTEXT.Pipe() for _ in range(size)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            _CONTEXT.Process(target=_serve, args=(rank, size, str(store), timeout, pipe), daemon=True)
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()
        # Returns when all processes have imported torch and joined the group.
        self.run(os.getpid)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """The result of ``function`` on each rank; raises with the first failing rank's traceback."""
        results = self.outcomes(function, *args, **kwargs)
        for rank, result in enumerate(results):
            if isinstance(result, Failure):
                raise AssertionError(f"rank {rank}:\n{result.trace}")
        return results

    def outcomes(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """As ``run``, but with a ``Failure`` for a rank that raised, or whose process ended."""
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_PATIENCE):
                raise AssertionError(f"rank {rank} has not answered within {_PATIENCE} s")
            try:
                results.append(pipe.recv())
            except EOFError as error:
                results.append(Failure(error))
        return results

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.join(1)
            process.kill()
            process.join()
        self._folder.cleanup()


class Failure:
    def __init__(self, error: Exception) -> None:
        self.message = f"{type(error).__name__}: {error}"
        self.trace = "".join(traceback.format_exception(error))


def _serve(rank: int, size: int, store: str, timeout: float, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(function(*args, **kwargs))
        except Exception as error:
            pipe.send(Failure(error))
        # torch.compile limits the number of compilations of a function in a process: reset it between jobs.
        if "torch._dynamo" in sys.modules:
            sys.modules["torch._dynamo"].reset()
