"""Symmetric memory: kernels read peers' buffers over NVLink.

For a few megabytes this takes less time than the launch of a collective. It uses PyTorch's symmetric memory without
NVLink multicast: each rank has a buffer of the same size, and views of the others' buffers.
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

from flashlatte.distributed import collectives
from flashlatte.distributed.agreement import Agreement

# Alignment of parts of a buffer, in bytes.
_ALIGNMENT = 256
_MIN_BYTES = 1 << 20
# The pool of the summands' buffers.
_SUM_POOL = "summands"
# If a rank does not reach a barrier, the others' kernels fail after NCCL's default timeout.
_BARRIER_MILLISECONDS = 600_000

# Limit on the bytes that a rank reads for a sum: it reads the summands of all ranks, which a collective avoids.
MAX_SUM_BYTES = 4 * 2**20

Part = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class SharedTensors:
    """Tensors in every rank's buffer: ``parts[i][rank]``. Reading another rank's tensor is the communication."""

    parts: tuple[tuple[torch.Tensor, ...], ...]
    handle: Any

    def barrier(self) -> None:
        """Barrier on the current stream: every rank's earlier writes are visible, and its earlier reads are done."""
        self.handle.barrier(0, _BARRIER_MILLISECONDS)


class PeerMemory:
    """Buffers on every rank's GPU. All ranks must take the same parts in the same order.

    Buffers are never freed, since CUDA graphs may use them. Their sizes are powers of two, so that the buffers of a
    pool take at most twice the size of the largest one.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self._buffers: dict[str, tuple[torch.Tensor, Any]] = {}
        self._allocated: list[tuple[torch.Tensor, Any]] = []
        self._taken: dict[tuple[str, tuple[Part, ...]], SharedTensors] = {}
        self._buffer(_MIN_BYTES, _SUM_POOL)

    @classmethod
    def connect(cls, group: dist.ProcessGroup, device: torch.device, agreement: Agreement) -> PeerMemory | str:
        """The memory, or the reason why the ranks have no peer access; the same kind of result on all ranks."""
        reason = _unreachable(group, device)
        if not agreement.same("PeerMemory", reason or socket.gethostname()) or reason is not None:
            return reason or "the ranks are on several hosts"
        memory: PeerMemory | str
        try:
            memory = cls(group, device)
        except RuntimeError as error:
            memory = str(error)
        connected = agreement.same("PeerMemory", isinstance(memory, cls))
        return memory if connected else "some GPUs have no access to the others' memory"

    def take(self, *parts: Part, pool: str) -> SharedTensors:
        """Tensors of the given shapes and dtypes; equal arguments return the same tensors.

        Tensors of different calls may overlap within a pool, never between pools.
        """
        if (pool, parts) not in self._taken:
            self._taken[pool, parts] = self._allocate(parts, pool)
        return self._taken[pool, parts]

    def can_sum(self, x: torch.Tensor) -> bool:
        """Whether ``sum`` supports x and is faster than a collective."""
        return x.dtype in (torch.float32, torch.bfloat16) and (self.group.size() - 1) * x.nbytes <= MAX_SUM_BYTES

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x, which must have one shape; bitwise identical on all ranks."""
        buffer, _ = self._buffer(x.nbytes, _SUM_POOL)
        mine = buffer[: x.nbytes].view(x.dtype).view(x.shape)
        reduce = torch.ops.symm_mem.one_shot_all_reduce_copy
        return reduce(mine, x.contiguous(), "sum", self.group.group_name)

    def _allocate(self, parts: Sequence[Part], pool: str) -> SharedTensors:
        starts, end = [], 0
        for shape, dtype in parts:
            starts.append(end)
            end += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        _, handle = self._buffer(end, pool)
        views = tuple(
            tuple(handle.get_buffer(rank, shape, dtype, start // dtype.itemsize) for rank in range(self.group.size()))
            for (shape, dtype), start in zip(parts, starts, strict=True)
        )
        return SharedTensors(views, handle)

    def _buffer(self, size: int, pool: str) -> tuple[torch.Tensor, Any]:
        """The pool's buffer; replaced by a larger one if it has fewer than ``size`` bytes."""
        if pool not in self._buffers or size > self._buffers[pool][0].nbytes:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "buffers of this size cannot be allocated during CUDA graph capture: make the call once before "
                    "capture"
                )
            buffer = rendezvous(max(_MIN_BYTES, 1 << (size - 1).bit_length()), self.device, self.group)
            self._allocated.append(buffer)
            self._buffers[pool] = buffer
        return self._buffers[pool]


class RankSum:
    """Sums tensors over ranks, by peer memory if that is faster, else by all-reduce.

    All ranks must call it with the same shapes in the same order.

    Args:
        group: a process group of torch.distributed.
        agreement: compares whether all ranks have peer access.
    """

    def __init__(self, group: dist.ProcessGroup, agreement: Agreement) -> None:
        self.group = group
        self._agreement = agreement
        self._peers: PeerMemory | str | None = None

    def __call__(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in the dtype of ``part``, which may be overwritten."""
        if part.numel() == 0 or self.group.size() == 1:
            return part
        if self._peers is None:
            self._peers = PeerMemory.connect(self.group, part.device, self._agreement)
        if isinstance(self._peers, PeerMemory) and self._peers.can_sum(part):
            return self._peers.sum(part)
        return collectives.all_reduce(part, self.group)


def rendezvous(size: int, device: torch.device, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    """Allocate ``size`` bytes on every rank; returns this rank's buffer, and the handle of symmetric memory."""
    symmetric = importlib.import_module("torch.distributed._symmetric_memory")
    buffer = symmetric.empty(size, dtype=torch.uint8, device=device)
    return buffer, symmetric.rendezvous(buffer, group)


def _unreachable(group: dist.ProcessGroup, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"it needs GPUs, got tensors on {device}"
    if "nccl" not in str(dist.get_backend(group)):
        return f"it needs an NCCL process group, got {dist.get_backend(group)}"
    try:
        symmetric = importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError:
        symmetric = None
    if not hasattr(symmetric, "rendezvous") or not hasattr(symmetric, "empty"):
        return f"PyTorch {torch.__version__} has no symmetric memory"
    return None
