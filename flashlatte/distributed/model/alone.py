"""What an engine asks of the processes that compute its model, where there is only one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch


class Alone:
    """One process, which takes the requests, has the whole model and all keys, and waits for nobody."""

    rank, size, keys_over = 0, 1, 1
    leads, closed = True, False

    def agree(self, facts: Mapping[str, object]) -> None:
        """Raise ValueError, on all ranks, where the engines were not made alike."""

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        return number

    def shard(self, metadata: Any, cache_format: str) -> Any:
        """A step's metadata for the keys that this rank has."""
        return metadata

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of what each rank has, in the dtype of ``part``, which may be overwritten."""
        return part

    def send(self, batch: Any) -> None:
        """Tell the others what to compute."""

    def receive(self) -> Any:
        """What rank 0 sends; None: nothing more."""

    def share_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rank 0's tokens on every rank."""
        return tokens

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for this rank's GPU."""
        event.synchronize()

    def failing_together(self) -> contextlib.AbstractContextManager[None]:
        """Where one rank fails, the others do."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Let the others go."""

    def part(self) -> None:
        """Leave the others."""
