"""Shared memory of CPU processes, as a substitute for peer memory of GPUs."""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from flashlatte.distributed import peer_memory

_numbers = itertools.count()


class SharedFiles:
    def __init__(self, size: int, group: dist.ProcessGroup) -> None:
        where = [tempfile.mkdtemp() if group.rank() == 0 else ""]
        dist.broadcast_object_list(where, 0, group)
        number = next(_numbers)
        paths = [Path(where[0]) / f"{number}-{rank}" for rank in range(group.size())]
        self.buffers = [torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8) for path in paths]
        self._group = group
        self.barrier()
        # The mappings outlive the files.
        if group.rank() == 0:
            shutil.rmtree(where[0])

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> torch.Tensor:
        start = offset * dtype.itemsize
        return self.buffers[rank][start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def barrier(self, channel: int = 0, milliseconds: int = 0) -> None:
        dist.barrier(self._group)


def rendezvous(size: int, device: torch.device, group: dist.ProcessGroup) -> tuple[torch.Tensor, SharedFiles]:
    files = SharedFiles(size, group)
    return files.buffers[group.rank()], files


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Context manager within which process groups on a CPU have peer memory."""
    with (
        mock.patch.object(peer_memory, "rendezvous", rendezvous),
        mock.patch.object(peer_memory, "_unreachable", return_value=None),
    ):
        yield
