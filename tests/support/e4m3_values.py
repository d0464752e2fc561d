"""``ptx.e4m3_values`` in PyTorch: what its code loads, and where WGMMA expects it."""

from __future__ import annotations

import re

import torch
from support import ptx

from flashlatte.kernels.hopper.ptx import e4m3_values

THREADS = 128


def swizzled(tile: torch.Tensor) -> torch.Tensor:
    """The bytes of a tile [64 keys, 512 columns] in shared memory: 128 columns after the other, 16 bytes permuted."""
    key, column = torch.meshgrid(torch.arange(64), torch.arange(512), indexing="ij")
    memory = torch.zeros(64 * 512, dtype=torch.uint8)
    memory[column // 128 * 8192 + key * 128 + (column % 128 ^ key % 8 * 16)] = tile
    return memory


def load_columns(memory: torch.Tensor, offset: int, number: int) -> torch.Tensor:
    """The operand [64, 64] of ``load_columns(thread_address(offset), number)``, as bytes."""
    thread = torch.arange(THREADS)
    shared = {"%tid.x": thread, "global_smem": torch.zeros_like(thread), "$1": torch.full_like(thread, offset)}
    registers = {"$8": ptx.run(e4m3_values._ADDRESS.value, shared)["$0"]}
    body = str(e4m3_values._load_asm(number)).strip("{} ")
    for statement in re.split(r";\s*(?![^{]*})", body):
        if matrices := re.match(r"ldmatrix\S+ \{(.*?)\}, \[address \+ (\d+)\]", statement):
            loaded = _transposed_matrices(memory, registers["address"] + int(matrices[2]))
            registers |= dict(zip(matrices[1].split(", "), loaded, strict=True))
        elif statement:
            registers = ptx.run(statement, registers)
    operand = torch.zeros(64, 64, dtype=torch.int64)
    row, position = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 4
    for word in range(8):
        for byte in range(4):
            values = registers[f"${word}"] >> 8 * byte & 255
            operand[row + word % 2 * 8, position + word // 2 * 16 + byte] = values
    return operand.to(torch.uint8)


def _transposed_matrices(memory: torch.Tensor, address: torch.Tensor) -> list[torch.Tensor]:
    """``ldmatrix.x4.trans``: lane 8 i + k has the address of row k of matrix i, which has 8 × 8 elements of two
    bytes."""
    lane, first = torch.arange(THREADS) % 32, torch.arange(THREADS) // 32 * 32
    results = []
    for matrix in range(4):
        result = torch.zeros(THREADS, dtype=torch.int64)
        for half in range(2):
            row = address[first + 8 * matrix + lane % 4 * 2 + half]
            for byte in range(2):
                result |= memory[row + lane // 4 * 2 + byte].long() << 16 * half + 8 * byte
        results.append(result)
    return results
