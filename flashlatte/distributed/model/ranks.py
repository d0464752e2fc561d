"""The processes of an engine on several GPUs: who has what of the model and the keys, and how plans travel.

Rank 0 schedules. Each step's numbers go to the others over a gloo group of the hosts, and every rank computes its part;
the collectives in between are those of the model's group.
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
from flashlatte.distributed.model.alone import Alone
from flashlatte.distributed.model.meeting import PATIENCE, Meeting
from flashlatte.distributed.summing import RankSum
from flashlatte.distributed.watch import Watch
from flashlatte.layers import MLAMetadata
from flashlatte.runtime import checks

# Rank 0 may have nothing to do for long. When it ends, its connections end, and so the wait of the others.
_IDLE = timedelta(days=7)
# Of a wait for this rank's GPU, until it is asked whether a rank that the GPU waits for has failed.
_GLANCE_SECONDS = 1.0


class Ranks(Alone):
    """The ranks that compute one model together, started by ``torchrun``, one process each.

    Args:
        tensor_parallel: ranks that heads and MLPs are divided over: as many as there are processes.
        context_parallel: ranks that the keys are divided over, a divisor of ``tensor_parallel``; that many neighbours
            store a token once.
        meeting: where the ranks come together; one of their own if None.
        facts: what else all ranks must say alike.

    Attributes:
        rank, size: this process's, and how many there are.
        device: of this process: the GPU of its number on the host (``LOCAL_RANK``), or the CPU.
        keys_over: ``context_parallel``.

    Raises:
        TypeError, ValueError: numbers below 1, or that do not go with the processes that there are; ranks that differ.
        RuntimeError: a rank that does not come, or has failed.
    """

    def __init__(
        self,
        tensor_parallel: int,
        context_parallel: int = 1,
        *,
        meeting: Meeting | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        with meeting or Meeting(joins=True) as meeting:
            self.size = checks.positive_int("tensor_parallel", tensor_parallel)
            self.keys_over = checks.positive_int("context_parallel", context_parallel)
            if meeting.world is None:
                if self.size < self.keys_over:
                    raise ValueError(
                        f"context_parallel must divide tensor_parallel {tensor_parallel}, the number of processes, got "
                        f"{context_parallel}: torchrun --nproc-per-node {context_parallel} starts so many"
                    )
                raise ValueError(
                    f"tensor_parallel {tensor_parallel} needs as many processes: start with torchrun --nproc-per-node "
                    f"{tensor_parallel}"
                )
            self.device = _own_device()
            asked = {"tensor_parallel": tensor_parallel, "context_parallel": context_parallel}
            meeting.agree({**asked, **(facts or {})})
        if self.size != meeting.world.size():
            raise ValueError(
                f"tensor_parallel must be the number of processes, {meeting.world.size()}, got {tensor_parallel}"
            )
        if self.size % self.keys_over:
            raise ValueError(
                f"context_parallel must divide tensor_parallel {tensor_parallel}, over whose ranks keys are divided, "
                f"got {context_parallel}"
            )
        self.rank = meeting.join().rank()
        # Groups of its own, which it can close when it fails, so that nobody waits for it.
        self._group = _group(range(self.size))
        self._plans = _group(range(self.size), backend="gloo", timeout=_IDLE)
        self._agreement = Agreement(self._plans, PATIENCE)
        self._context: ContextParallel | None = None
        firsts = range(0, self.size, self.keys_over) if self.keys_over > 1 else ()
        sharing = [_group(range(first, first + self.keys_over)) for first in firsts]
        if sharing:
            self._context = ContextParallel(sharing[self.rank // self.keys_over], timeout=PATIENCE)
        self._groups = [self._plans, self._group, *([self._context.group] if self._context else [])]
        for group in self._groups[1:]:
            # NCCL connects a group when it is first used, and would wait for ever for a rank that has died by then.
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        self._sum = RankSum(self._group, self._agreement)
        self._watch = Watch(_group(range(self.size), backend="gloo", timeout=_IDLE))

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which takes requests and schedules."""
        return self.rank == 0

    @property
    def closed(self) -> bool:
        """Whether the ranks have parted."""
        return not self._groups

    def share(self, count: int) -> tuple[int, int]:
        """(first, end) of what this rank has of ``count`` heads, or of other things that stay whole."""
        return self.rank * count // self.size, (self.rank + 1) * count // self.size

    def agree(self, facts: Mapping[str, object]) -> None:
        """Raise ValueError, on all ranks, where the engines were not made alike."""
        self._agreement.check("Engine", facts)

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        return self._agreement.least("a default of num_pages", number)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of what each rank has, in the dtype of ``part``, which may be overwritten."""
        return self._sum(part)

    def shard(self, metadata: MLAMetadata, cache_format: str) -> MLAMetadata:
        """A step's metadata for the keys that this rank has."""
        if self._context is None:
            return metadata
        return shard_metadata(metadata, self._context, cache_format=cache_format)

    def send(self, batch: Any) -> None:
        """Tell the others what to compute, in plain numbers; None: that there is nothing more to come.

        Raises:
            RuntimeError: there is nothing more, and another rank has failed, which a message may not notice.
        """
        if batch is None:
            check_others(self._plans)
        dist.broadcast_object_list([batch], 0, group=self._plans)

    def receive(self) -> Any:
        """What rank 0 sends, whenever that is.

        Raises:
            RuntimeError: rank 0 ended without a word.
        """
        told = [None]
        try:
            dist.broadcast_object_list(told, 0, group=self._plans)
        except RuntimeError as error:
            raise RuntimeError(
                "rank 0 ended before its engine was closed: Engine.close(), or `with engine:`"
            ) from error
        return told[0]

    def share_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rank 0's tokens on every rank, in place: what was sampled is the same on all, whatever the last bits are."""
        dist.broadcast(tokens, 0, group=self._group)
        return tokens

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for this rank's GPU, which may wait for ever for that of a rank that has failed.

        Raises:
            RuntimeError: another rank failed; says which, and why.
        """
        with self.failing_together():
            asked = time.monotonic()
            while not event.query():
                if time.monotonic() - asked > _GLANCE_SECONDS:
                    check_others(self._plans)
                    asked = time.monotonic()

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Where this rank fails, the others do, with its error; where another did first, this one with that."""
        try:
            with contextlib.ExitStack() as told:
                # A rank may wait for this one by any of the groups.
                for group in self._groups:
                    told.enter_context(failing_together(group))
                yield
        except BaseException:
            self.part()
            raise

    def close(self) -> None:
        """On rank 0: let the others go; elsewhere, and again, nothing.

        Raises:
            RuntimeError: one has failed since the last batch; says which, and why.
        """
        if self.leads and not self.closed:
            with self.failing_together():
                self.send(None)
            self.part()

    def part(self) -> None:
        """Leave the others. Whoever waits for this rank gets an error at once."""
        for group in self._groups:
            # One of NCCL would wait for what is under way; that of the hosts tells the others.
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
            f"tensor_parallel needs a GPU for each process of a host, and process {number} has none of {count}"
        )
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def _group(ranks: range, **options: object) -> dist.ProcessGroup:
    made = dist.new_group(list(ranks), **options)  # type: ignore[arg-type]
    assert made is not None
    return made  # type: ignore[return-value]
