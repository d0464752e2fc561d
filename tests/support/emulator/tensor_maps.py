"""TMA descriptors of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from support.emulator.elements import Array
from support.emulator.global_memory import GLOBAL, GlobalMemory


@dataclass
class TensorMap:
    """A TMA descriptor: boxes of a tensor, and their layout in shared memory.

    Attributes:
        address: address of the tensor. ``strides`` are in bytes.
        element: bytes of an element.
        swizzle: bytes of a swizzled row, or 0.
    """

    address: int
    shape: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]
    element: int
    swizzle: int

    def __post_init__(self) -> None:
        self.bytes = int(np.prod(self.box)) * self.element
        self._indices = np.indices(self.box).reshape(len(self.box), -1)

    def shared_bytes(self, begin: int) -> Array:
        """Offsets [elements, bytes of an element] of a box that begins at ``begin``."""
        offsets = begin + np.arange(self._indices.shape[1]) * self.element
        return swizzled(offsets, self.swizzle)[:, None] + np.arange(self.element)

    def load(self, memory: GlobalMemory, origin: Sequence[int]) -> Array:
        """The bytes of a box; 0 outside of the tensor."""
        offsets, inside = self._global_bytes(memory, origin)
        values = np.zeros((len(inside), self.element), np.uint8)
        values[inside] = memory.words(1)[offsets]
        return values

    def store(self, memory: GlobalMemory, origin: Sequence[int], values: Array, adds: bool) -> None:
        """Store a box. ``adds``: add float32 values to the stored ones."""
        offsets, inside = self._global_bytes(memory, origin)
        if adds:
            added = np.ascontiguousarray(values[inside]).view(np.float32)
            memory.words(4).view(np.float32)[offsets[:, 0] // 4] += added[:, 0]
        else:
            memory.words(1)[offsets] = values[inside]

    def _global_bytes(self, memory: GlobalMemory, origin: Sequence[int]) -> tuple[Array, Array]:
        """Offsets of the bytes of elements inside of the tensor, and which elements these are."""
        position = self._indices + np.array(origin)[:, None]
        inside = ((position >= 0) & (position < np.array(self.shape)[:, None])).all(0)
        offsets = (position * np.array(self.strides)[:, None]).sum(0)[inside] + self.address - GLOBAL
        return memory.checked(offsets, self.element)[:, None] + np.arange(self.element), inside


def swizzled(offsets: Array, swizzle: int) -> Array:
    """Offsets in shared memory with the 16-byte chunks of rows of ``swizzle`` bytes exchanged."""
    if not swizzle:
        return offsets
    return offsets ^ (((offsets >> 7) & (swizzle // 16 - 1)) << 4)
