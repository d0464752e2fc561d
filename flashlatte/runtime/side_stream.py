"""A second stream during CUDA-graph capture: two chains of short kernels then take the time of the longer one."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


class SideStream:
    """Runs work on a second stream while a CUDA graph is captured, and on the current stream otherwise.

    Outside a graph, forking and joining would take the host longer than the GPU gains. The caller must keep the tensors
    that the work reads until ``join``, and must not use its results before.

    Args:
        device: the device of the work.
        wanted: whether to use a second stream at all.
    """

    def __init__(self, device: torch.device, wanted: bool = True) -> None:
        capturing = (
            wanted
            and device.type == "cuda"
            and not torch.compiler.is_compiling()
            and torch.cuda.is_current_stream_capturing()
        )
        self._stream = _side_stream(device) if capturing else None

    def run(self, work: Callable[[], None]) -> None:
        """Launch ``work`` after all earlier work of the current stream and of the side stream."""
        if self._stream is None:
            work()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()

    def join(self) -> None:
        """Make the current stream wait for all of the work."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One per device: PyTorch keeps a matmul workspace of 32 MiB for each stream."""
    return torch.cuda.Stream(device)
