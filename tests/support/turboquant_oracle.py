"""Oracle of TurboQuant records and operations in plain Python, one value at a time."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import pairwise

import torch

from flashlatte.testing.byte_oracles import E4M3_VALUES, e4m3_encode, float32

# Positive centroids for N(0, 1): the table of J. Max (1960), with more digits.
POSITIVE = {
    3: (0.2450942, 0.7560050, 1.3439093, 2.1519457),
    4: (0.1283950, 0.3880480, 0.6567590, 0.9423402, 1.2562310, 1.6180464, 2.0690172, 2.7325896),
}


def centroids(bits: int) -> list[float]:
    return [*(-x for x in reversed(POSITIVE[bits])), *POSITIVE[bits]]


def rotate(row: Sequence[float]) -> list[float]:
    """Walsh-Hadamard transform: Σ_j row[j] (-1)^popcount(i & j) / √n for each i."""
    n = len(row)
    return [sum(x * (-1) ** bin(i & j).count("1") for j, x in enumerate(row)) / math.sqrt(n) for i in range(n)]


def encode_record(key: Sequence[float], value: Sequence[float], key_bits: int, value_bits: int) -> bytes:
    """Encode the key and value of one token and head."""
    if key_bits == 8:
        record = bytes(map(e4m3_encode, key))
    else:
        codes = [sum(x >= middle for middle in _midpoints(key_bits)) for x in _normal(key)]
        record = pack(codes, key_bits) + _half(math.sqrt(sum(x * x for x in key)))
    largest, low = 2**value_bits - 1, min(value)
    scale = max(float32((max(value) - low) / largest), 1e-8)
    steps = [min(math.floor(float32(float32(x - low) / scale) + 0.5), largest) for x in value]
    return record + pack(steps, value_bits) + _half(scale) + _half(low)


def decode_record(record: bytes, head_dim: int, key_bits: int, value_bits: int) -> tuple[list[float], list[float]]:
    """Decode a record to key and value."""
    at = head_dim * key_bits // 8
    if key_bits == 8:
        key = [E4M3_VALUES[byte] for byte in record[:at]]
    else:
        numbers = [centroids(key_bits)[code] for code in unpack(record[:at], key_bits)]
        length = math.sqrt(sum(x * x for x in numbers))
        (norm,) = struct.unpack("<e", record[at : at + 2])
        key = [norm * x / length for x in rotate(numbers)]
        at += 2
    end = at + head_dim * value_bits // 8
    scale, low = struct.unpack("<ee", record[end : end + 4])
    return key, [step * scale + low for step in unpack(record[at:end], value_bits)]


def key_margin(key: Sequence[float], bits: int) -> float:
    """The smallest distance of a rotated value, in standard deviations, to a boundary between codes."""
    if bits == 8:
        return math.inf
    return min(abs(x - middle) for x in _normal(key) for middle in _midpoints(bits))


def pack(codes: Sequence[int], bits: int) -> bytes:
    """Pack codes into bytes, the first code in the lowest bits."""
    number = sum(code << bits * i for i, code in enumerate(codes))
    return number.to_bytes(len(codes) * bits // 8, "little")


def unpack(data: bytes, bits: int) -> list[int]:
    number = int.from_bytes(data, "little")
    return [number >> bits * i & (1 << bits) - 1 for i in range(len(data) * 8 // bits)]


def _normal(key: Sequence[float]) -> list[float]:
    norm = math.sqrt(sum(x * x for x in key))
    return [x * math.sqrt(len(key)) for x in rotate([x / (norm + 1e-8) for x in key])]


def _midpoints(bits: int) -> list[float]:
    levels = centroids(bits)
    return [(a + b) / 2 for a, b in pairwise(levels)]


def _half(x: float) -> bytes:
    return struct.pack("<e", max(-65504.0, min(65504.0, x)))


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    bits: tuple[int, int],
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [b, s_q, h_q, d], lse [b, h_q, s_q]) in float64, one row at a time; lse of a row without keys is -inf."""
    batch, s_q, h_q, head_dim = q.shape
    num_pages, page_size, h_kv, _ = cache.shape
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full((batch, h_q, s_q), -torch.inf, dtype=torch.float64)
    for request in range(batch):
        length = int(cache_seqlens[request])
        for kv_head in range(h_kv):
            positions: list[int] = []
            rows: list[tuple[list[float], list[float]]] = []
            for position in range(min(length, block_table.shape[1] * page_size)):
                page = int(block_table[request, position // page_size])
                if 0 <= page < num_pages:
                    positions.append(position)
                    record = bytes(cache[page, position % page_size, kv_head].tolist())
                    rows.append(decode_record(record, head_dim, *bits))
            for token in range(s_q):
                last = length - s_q + token if causal else length - 1
                seen = [row for position, row in zip(positions, rows, strict=True) if position <= last]
                if not seen:
                    continue
                keys, values = (torch.tensor(side, dtype=torch.float64) for side in zip(*seen, strict=True))
                for head in range(kv_head * h_q // h_kv, (kv_head + 1) * h_q // h_kv):
                    scores = keys @ q[request, token, head].double() * softmax_scale
                    out[request, token, head] = scores.softmax(dim=0) @ values
                    lse[request, head, token] = scores.logsumexp(dim=0)
    return out, lse
