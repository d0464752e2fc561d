"""Global memory: the bytes of tensors, with gaps between them that fault."""

from __future__ import annotations

import ctypes

import numpy as np
from support.emulator.elements import Array, spread

GLOBAL = 1 << 40
_ALIGNMENT, _GAP = 256, 512


class OutOfBounds(Exception):
    pass


class GlobalMemory:
    """Host memory that a launch reaches, copied to emulated addresses."""

    def __init__(self) -> None:
        self._bytes = np.zeros(1 << 16, np.uint8)
        self._valid = np.zeros(1 << 16, np.bool_)
        self._end = _GAP
        # Host address, size, emulated offset.
        self._ranges: list[tuple[int, int, int]] = []

    def add(self, host: int, size: int) -> None:
        if not size or any(begin <= host and host + size <= begin + length for begin, length, _ in self._ranges):
            return
        begin = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        self._end = begin + size + _GAP
        if self._end > len(self._bytes):
            grown = -(-2 * self._end // _ALIGNMENT) * _ALIGNMENT - len(self._bytes)
            self._bytes, self._valid = (
                np.concatenate((x, np.zeros(grown, x.dtype))) for x in (self._bytes, self._valid)
            )
        self._bytes[begin : begin + size] = _host_bytes(host, size)
        self._valid[begin : begin + size] = True
        self._ranges.append((host, size, begin))

    def address(self, host: int, size: int = 1) -> int:
        """The emulated address of ``size`` bytes at a host address, or 0."""
        for begin, length, offset in self._ranges:
            if begin <= host and host + size <= begin + length:
                return GLOBAL + offset + host - begin
        return 0

    def copy_back(self) -> None:
        for host, size, offset in self._ranges:
            _host_bytes(host, size)[:] = self._bytes[offset : offset + size]

    def words(self, size: int) -> Array:
        """All of it, as unsigned integers of ``size`` bytes."""
        return self._bytes.view(f"u{size}")

    def offsets(self, addresses: Array, size: int, mask: Array | None = None) -> Array:
        """Offsets of the lanes' aligned accesses of ``size`` bytes; lanes outside of ``mask`` get any valid offset."""
        offsets = spread(addresses).astype(np.int64) - GLOBAL
        if mask is not None:
            offsets = np.where(mask, offsets, offsets[mask][0])
        if (offsets % size).any():
            raise OutOfBounds(f"misaligned access of {size} bytes")
        return self.checked(offsets, size)

    def checked(self, offsets: Array, size: int) -> Array:
        """The offsets, if ``size`` bytes at each of them belong to tensors."""
        inside = (offsets >= 0) & (offsets + size <= len(self._bytes))
        if not inside.all() or not (self._valid[offsets] & self._valid[offsets + size - 1]).all():
            raise OutOfBounds(f"global access of {size} bytes outside of the tensors: {self._nearest(offsets, size)}")
        return offsets

    def _nearest(self, offsets: Array, size: int) -> str:
        """How far the first bad access is from the tensor before it."""
        for offset in np.ravel(offsets).tolist():
            if not any(begin <= offset and offset + size <= begin + length for _, length, begin in self._ranges):
                before = [(offset - begin, length) for _, length, begin in self._ranges if begin <= offset]
                return f"at byte {before[-1][0]} of a tensor of {before[-1][1]}" if before else f"at {offset}"
        return "in a gap"


def _host_bytes(address: int, size: int) -> Array:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
