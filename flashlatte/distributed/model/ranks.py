"""The ranks of an engine on several GPUs: tensor parallelism, context parallelism, and the broadcast of batches.

Rank 0 schedules, and broadcasts each batch over a gloo group. Every rank computes its part of the model; the
collectives in between use the model's process group.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flashlatte.distributed.agreement import Agreement, check_others, failing_together
from flashlatte.distributed.context_parallel import ContextParallel
from flashlatte.distributed.metadata import shard_metadata
from flashlatte.distributed.model.rendezvous import TIMEOUT, Rendezvous
from flashlatte.distributed.model.single_process import SingleProcess
from flashlatte.distributed.peer_memory import RankSum
from flashlatte.distributed.watch import Watch
from flashlatte.layers import MLAMetadata
from flashlatte.runtime import checks

# Rank 0 may be idle for long. When it exits, its connections close, which ends the wait of the others.
_IDLE = timedelta(days=7)
# Interval at which a wait for this rank's GPU checks for failures of other ranks.
_POLL_SECONDS = 1.0


class Ranks(SingleProcess):
    """The ranks that compute one model together, one process each, started by ``torchrun``.

    Args:
        tensor_parallel: number of ranks over which heads and MLPs are divided; equals the number of processes.
        context_parallel: number of consecutive ranks over which keys are sharded, a divisor of ``tensor_parallel``.
        rendezvous: an entered or new ``Rendezvous``; a new one if None.
        facts: further facts that must agree on all ranks.

    Attributes:
        rank, size: this process's rank, and the number of ranks.
        device: this process's device: the GPU ``LOCAL_RANK``, or the CPU.
        kv_ranks: ``context_parallel``.

    Raises:
        TypeError, ValueError: sizes below 1, or that do not match the number of processes; facts that differ.
        RuntimeError: a rank that does not arrive within the timeout, or has failed.
    """

    def __init__(
        self,
        tensor_parallel: int,
        context_parallel: int = 1,
        *,
        rendezvous: Rendezvous | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        with rendezvous or Rendezvous(joins=True) as rendezvous:
            self.size = checks.positive_int("tensor_parallel", tensor_parallel)
            self.kv_ranks = checks.positive_int("context_parallel", context_parallel)
            if rendezvous.world is None:
                if self.size < self.kv_ranks:
                    raise ValueError(
                        f"context_parallel must divide tensor_parallel {tensor_parallel}, the number of processes, got "
                        f"{context_parallel}: start with torchrun --nproc-per-node {context_parallel}"
                    )
                raise ValueError(
                    f"tensor_parallel {tensor_parallel} needs {tensor_parallel} processes: start with torchrun "
                    f"--nproc-per-node {tensor_parallel}"
                )
            self.device = _own_device()
            arguments = {"tensor_parallel": tensor_parallel, "context_parallel": context_parallel}
            rendezvous.agree({**arguments, **(facts or {})})
        if self.size != rendezvous.world.size():
            raise ValueError(
                f"tensor_parallel must be the number of processes, {rendezvous.world.size()}, got {tensor_parallel}"
            )
        if self.size % self.kv_ranks:
            raise ValueError(f"context_parallel must divide tensor_parallel {tensor_parallel}, got {context_parallel}")
        self.rank = rendezvous.join().rank()
        # Separate groups can be closed on failure, so that no rank waits for this one.
        self._group = _group(range(self.size))
        self._plans = _group(range(self.size), backend="gloo", timeout=_IDLE)
        self._agreement = Agreement(self._plans, TIMEOUT)
        self._context: ContextParallel | None = None
        firsts = range(0, self.size, self.kv_ranks) if self.kv_ranks > 1 else ()
        sharing = [_group(range(first, first + self.kv_ranks)) for first in firsts]
        if sharing:
            self._context = ContextParallel(sharing[self.rank // self.kv_ranks], timeout=TIMEOUT)
        self._groups = [self._plans, self._group, *([self._context.group] if self._context else [])]
        for group in self._groups[1:]:
            # NCCL connects a group at its first use, and would hang then if a rank had died.
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        self._sum = RankSum(self._group, self._agreement)
        self._watch = Watch(_group(range(self.size), backend="gloo", timeout=_IDLE))

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which schedules."""
        return self.rank == 0

    @property
    def closed(self) -> bool:
        """Whether this rank's process groups are closed."""
        return not self._groups

    def share(self, count: int) -> tuple[int, int]:
        """(first, end) of this rank's range of ``count`` heads or other indivisible parts."""
        return self.rank * count // self.size, (self.rank + 1) * count // self.size

    def agree(self, facts: Mapping[str, object]) -> None:
        """Raise ValueError on all ranks if engines differ in these facts."""
        self._agreement.check("Engine", facts)

    def all_reduce_min(self, number: int) -> int:
        """The minimum of the ranks' numbers."""
        return self._agreement.all_reduce_min("a default of num_pages", number)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of ``part`` over ranks, in its dtype; ``part`` may be overwritten."""
        return self._sum(part)

    def shard(self, metadata: MLAMetadata, cache_format: str) -> MLAMetadata:
        """A step's metadata for the keys that this rank stores."""
        if self._context is None:
            return metadata
        return shard_metadata(metadata, self._context, cache_format=cache_format)

    def send(self, batch: Any) -> None:
        """Broadcast a batch from rank 0; None after the last one.

        Raises:
            RuntimeError: ``batch`` is None and another rank has failed, which the broadcast might not detect.
        """
        if batch is None:
            check_others(self._plans)
        dist.broadcast_object_list([batch], 0, group=self._plans)

    def receive(self) -> Any:
        """Wait for a batch from rank 0.

        Raises:
            RuntimeError: rank 0 exited without closing its engine.
        """
        received = [None]
        try:
            dist.broadcast_object_list(received, 0, group=self._plans)
        except RuntimeError as error:
            raise RuntimeError(
                "rank 0 exited before its engine was closed: call Engine.close(), or use `with engine:`"
            ) from error
        return received[0]

    def share_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Broadcast rank 0's sampled tokens in place, since the ranks' logits may differ by rounding."""
        dist.broadcast(tokens, 0, group=self._group)
        return tokens

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for an event of this rank's GPU, which hangs in a collective if another rank has failed.

        Raises:
            RuntimeError: another rank failed; with its rank and error.
        """
        with self.failing_together():
            last_check = time.monotonic()
            while not event.query():
                if time.monotonic() - last_check > _POLL_SECONDS:
                    check_others(self._plans)
                    last_check = time.monotonic()

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Context manager that reports an exception to the other ranks, or raises an earlier one of theirs."""
        try:
            with contextlib.ExitStack() as stack:
                # Other ranks may wait in any of the groups.
                for group in self._groups:
                    stack.enter_context(failing_together(group))
                yield
        except BaseException:
            self.leave()
            raise

    def close(self) -> None:
        """Stop the other ranks. Does nothing on other ranks than 0, or if already closed.

        Raises:
            RuntimeError: a rank has failed since the last batch; with its rank and error.
        """
        if self.is_leader and not self.closed:
            with self.failing_together():
                self.send(None)
            self.leave()

    def leave(self) -> None:
        """Close this rank's process groups; ranks that wait for this one raise immediately."""
        for group in self._groups:
            # Destroying an NCCL group would wait for pending work. Closing the gloo group notifies the other ranks.
            if dist.get_backend(group) == "gloo":
                dist.destroy_process_group(group)
        self._groups = []
        self._watch.leave()


def _own_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= count:
        raise ValueError(
            f"tensor_parallel needs a GPU for each process of a host, got {count} GPUs and LOCAL_RANK {number}"
        )
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def _group(ranks: range, **options: object) -> dist.ProcessGroup:
    group = dist.new_group(list(ranks), **options)  # type: ignore[arg-type]
    assert group is not None
    return group  # type: ignore[return-value]
