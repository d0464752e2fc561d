"""The interface of an engine to its ranks, implemented for a single process."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch


class SingleProcess:
    """One process with the whole model and all keys; every method is local."""

    rank, size, kv_ranks = 0, 1, 1
    is_leader, closed = True, False

    def agree(self, facts: Mapping[str, object]) -> None:
        """Raise ValueError on all ranks if engines differ in these facts."""

    def all_reduce_min(self, number: int) -> int:
        """The minimum of the ranks' numbers."""
        return number

    def shard(self, metadata: Any, cache_format: str) -> Any:
        """A step's metadata for the keys that this rank stores."""
        return metadata

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of ``part`` over ranks, in its dtype; ``part`` may be overwritten."""
        return part

    def send(self, batch: Any) -> None:
        """Send a batch to the other ranks."""

    def receive(self) -> Any:
        """Receive a batch from rank 0; None after the last one."""

    def share_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Broadcast rank 0's tokens."""
        return tokens

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for an event of this rank's GPU."""
        event.synchronize()

    def failing_together(self) -> contextlib.AbstractContextManager[None]:
        """Context manager that propagates failures between ranks."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Stop the other ranks."""

    def leave(self) -> None:
        """Close this rank's process groups."""
