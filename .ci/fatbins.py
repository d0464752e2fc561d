"""Remove machine code for other GPUs from a compiled extension.

CUDA keeps the machine code of a source file in a fat binary: a header and one entry for each architecture. Entries that
are not needed are overwritten by zeros, which compress to nothing; all offsets in the extension stay valid. The driver
reads an entry only if its architecture is the GPU's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# uint32 magic, uint16 version, uint16 bytes of this header, uint64 bytes of the entries.
HEADER = struct.Struct("<IHHQ")
MAGIC = (0xBA55ED50).to_bytes(4, "little")
# uint16 kind, uint16, uint32 bytes of this header, uint64 bytes of the code, three of uint32, uint32 architecture.
ENTRY = struct.Struct("<HHIQIIII")
MACHINE_CODE = 2

Unwanted = Callable[[bytes], bool]


@dataclass(frozen=True)
class Entry:
    """Code for one architecture (90: sm_90 and sm_90a) at bytes ``start`` to ``end`` of the extension."""

    kind: int
    architecture: int
    start: int
    end: int


def entries(extension: bytes | bytearray) -> Iterator[Entry]:
    start = 0
    while (start := extension.find(MAGIC, start)) >= 0:
        _, version, header, size = HEADER.unpack_from(extension, start)
        if (version, header) != (1, HEADER.size) or start + header + size > len(extension):
            start += len(MAGIC)  # the magic number among other data
            continue
        at, end = start + header, start + header + size
        while at < end:
            kind, _, header, size, *_, architecture = ENTRY.unpack_from(extension, at)
            yield Entry(kind, architecture, at + header, at + header + size)
            at += header + size
        start = end


def strip(extension: bytes, architecture: int, unwanted: Unwanted | None = None) -> tuple[bytes, int]:
    """The extension with machine code for ``architecture`` only, and the bytes of that code.

    Args:
        unwanted: whether to remove an entry for ``architecture`` too, given its code: an ELF file with the names of
            its kernels, or a compressed one.
    """
    stripped, kept = bytearray(extension), 0
    for entry in entries(extension):
        size = entry.end - entry.start
        wanted = (entry.kind, entry.architecture) == (MACHINE_CODE, architecture)
        if wanted and not (unwanted and unwanted(extension[entry.start : entry.end])):
            kept += size
        else:
            stripped[entry.start : entry.end] = bytes(size)
    return bytes(stripped), kept
