"""Memory of every GPU of a group that kernels on each of them read where it lies, over NVLink.

A few megabytes are read so in less time than a collective takes to begin. It is PyTorch's symmetric memory, without
NVLink multicast: each rank has a buffer, all of one size, and views of the others'.
"""

from __future__ import annotations

import importlib
import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flashlatte.distributed.agreement import Agreement

# Parts of a buffer begin at multiples of it.
_ALIGNMENT = 256
_SMALLEST = 1 << 20
# The pool that a sum is copied into.
_SUMMANDS = "summands"
# A rank that does not come to a barrier ends the others' kernels after as long as NCCL would wait.
_BARRIER_MILLISECONDS = 600_000

# Every rank reads all others' summands, which a collective's rounds avoid.
MAX_SUM_BYTES = 4 * 2**20

Part = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Shared:
    """Parts of a buffer that every rank has, by rank: ``parts[i][rank]``; reading another rank's is what travels."""

    parts: tuple[tuple[torch.Tensor, ...], ...]
    handle: Any

    def barrier(self) -> None:
        """On the device's current stream: what every rank wrote before is there, and what it read before was read."""
        self.handle.barrier(0, _BARRIER_MILLISECONDS)


class PeerMemory:
    """Buffers on every rank's GPU. All ranks take the same parts in the same order.

    A buffer that became too small stays, since CUDA graphs may have it; sizes are powers of two, so all of a pool
    together are at most twice the largest.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self._buffers: dict[str, tuple[torch.Tensor, Any]] = {}
        self._made: list[tuple[torch.Tensor, Any]] = []
        self._taken: dict[tuple[str, tuple[Part, ...]], Shared] = {}
        self._buffer(_SMALLEST, _SUMMANDS)

    @classmethod
    def reach(cls, group: dist.ProcessGroup, device: torch.device, agreement: Agreement) -> PeerMemory | str:
        """The memory, or why the ranks cannot read each other's: the same on all."""
        reason = _unreachable(group, device)
        if not agreement.same("PeerMemory", reason or socket.gethostname()) or reason is not None:
            return reason or "the ranks are on several hosts"
        memory: PeerMemory | str
        try:
            memory = cls(group, device)
        except RuntimeError as error:
            memory = str(error)
        reached = agreement.same("PeerMemory", isinstance(memory, cls))
        return memory if reached else "some GPUs do not reach the others' memory"

    def take(self, *parts: Part, pool: str) -> Shared:
        """Parts of the given shapes and dtypes, the same ones whenever they are asked for again.

        What is taken of one pool by two calls may overlap; of two pools it never does.
        """
        if (pool, parts) not in self._taken:
            self._taken[pool, parts] = self._place(parts, pool)
        return self._taken[pool, parts]

    def sums(self, x: torch.Tensor) -> bool:
        """Whether ``sum`` takes such an x, and before a collective would have begun."""
        return x.dtype in (torch.float32, torch.bfloat16) and (self.group.size() - 1) * x.nbytes <= MAX_SUM_BYTES

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x, all of one shape, in one order and so the same bits on all ranks."""
        buffer, _ = self._buffer(x.nbytes, _SUMMANDS)
        mine = buffer[: x.nbytes].view(x.dtype).view(x.shape)
        reduce = torch.ops.symm_mem.one_shot_all_reduce_copy
        return reduce(mine, x.contiguous(), "sum", self.group.group_name)

    def _place(self, parts: Sequence[Part], pool: str) -> Shared:
        starts, end = [], 0
        for shape, dtype in parts:
            starts.append(end)
            end += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        _, handle = self._buffer(end, pool)
        views = tuple(
            tuple(handle.get_buffer(rank, shape, dtype, start // dtype.itemsize) for rank in range(self.group.size()))
            for (shape, dtype), start in zip(parts, starts, strict=True)
        )
        return Shared(views, handle)

    def _buffer(self, size: int, pool: str) -> tuple[torch.Tensor, Any]:
        """The pool's buffer, a larger one if it has less than ``size`` bytes."""
        if pool not in self._buffers or size > self._buffers[pool][0].nbytes:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "a CUDA graph cannot be the first to exchange results of this size: make the call once before "
                    "capture"
                )
            made = rendezvous(max(_SMALLEST, 1 << (size - 1).bit_length()), self.device, self.group)
            self._made.append(made)
            self._buffers[pool] = made
        return self._buffers[pool]


def rendezvous(size: int, device: torch.device, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    """A buffer of so many bytes on every rank: this one's, and what ``get_buffer`` and ``barrier`` are called on."""
    symmetric = importlib.import_module("torch.distributed._symmetric_memory")
    buffer = symmetric.empty(size, dtype=torch.uint8, device=device)
    return buffer, symmetric.rendezvous(buffer, group)


def _unreachable(group: dist.ProcessGroup, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"it needs GPUs, got tensors on {device}"
    if "nccl" not in str(dist.get_backend(group)):
        return f"it needs a process group of NCCL, got {dist.get_backend(group)}"
    try:
        symmetric = importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError:
        symmetric = None
    if not hasattr(symmetric, "rendezvous") or not hasattr(symmetric, "empty"):
        return f"PyTorch {torch.__version__} has no symmetric memory"
    return None
