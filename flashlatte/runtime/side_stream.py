"""Work beside the current stream's: two chains of short kernels in a CUDA graph take the time of the longer one."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


class SideStream:
    """Where a CUDA graph is being captured, work of a stream of its own; elsewhere all runs in the current stream, in
    order, since to fork and to join would take the host longer than the GPU gains.

    What the work reads must be kept by the caller until ``join``, and what it makes must not be looked at before.

    Args:
        device: of the work.
        wanted: whether to fork at all.
    """

    def __init__(self, device: torch.device, wanted: bool = True) -> None:
        capturing = (
            wanted
            and device.type == "cuda"
            and not torch.compiler.is_compiling()
            and torch.cuda.is_current_stream_capturing()
        )
        self._stream = _stream_beside(device) if capturing else None

    def run(self, work: Callable[[], None]) -> None:
        """What ``work`` launches comes after all that the current stream and this one were given before."""
        if self._stream is None:
            work()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()

    def join(self) -> None:
        """What the current stream is given from here on comes after all of the work."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """One of each device: PyTorch keeps a workspace of 32 MiB for the matrix products of each stream."""
    return torch.cuda.Stream(device)
