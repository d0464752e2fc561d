"""Encoding and decoding of cache bytes in plain Python, one value at a time: the oracle of the cache formats."""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Sequence

E4M3_MAX = 448.0
SMALLEST_SCALE_INPUT = 1e-4

V32_TILE, V32_LATENT, V32_ROPE = 128, 512, 64
MODEL1_TILE, MODEL1_LATENT, MODEL1_ROPE = 64, 448, 64
V41_BLOCK, NVFP4_BLOCK = 32, 16


def e4m3_decode(byte: int) -> float:
    """One sign bit, four exponent bits (bias 7), three mantissa bits; S.1111.111 is NaN, and there is no infinity."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 0xF, byte & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3_VALUES = [e4m3_decode(byte) for byte in range(256)]
_POSITIVE = E4M3_VALUES[:0x7F]


def e4m3_encode(x: float) -> int:
    """The byte of the nearest value, ties to even; saturates at ±448."""
    if math.isnan(x):
        return 0x7F
    sign = 0x80 if math.copysign(1.0, x) < 0 else 0
    magnitude = min(abs(x), E4M3_MAX)
    above = bisect_left(_POSITIVE, magnitude)
    if above == 0:
        return sign
    below_distance, above_distance = magnitude - _POSITIVE[above - 1], _POSITIVE[above] - magnitude
    if below_distance == above_distance:
        return sign | (above if above % 2 == 0 else above - 1)
    return sign | (above if above_distance < below_distance else above - 1)


def e8m0_decode(byte: int) -> float:
    return math.nan if byte == 0xFF else 2.0 ** (byte - 127)


def e8m0_encode(power_of_two: float) -> int:
    return 0xFF if math.isnan(power_of_two) else math.frexp(power_of_two)[1] - 1 + 127


def bf16_bytes(x: float) -> bytes:
    """The nearest bf16, ties to even, little-endian."""
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    if math.isnan(x):
        return struct.pack("<H", bits >> 16 | 0x40)
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def bf16_values(data: bytes) -> list[float]:
    return [struct.unpack("<f", b"\0\0" + data[at : at + 2])[0] for at in range(0, len(data), 2)]


def float32(x: float) -> float:
    """The nearest float32; infinity on overflow."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def tile_scale(tile: Sequence[float], scale_rounding: str = "power_of_two") -> float:
    """amax / 448 in float32: "power_of_two" rounds up to a power of two, at least 2^-13; "exact" does not round."""
    if any(math.isnan(x) for x in tile):
        return math.nan
    scale = float32(max(abs(x) for x in tile) / E4M3_MAX)
    if scale_rounding == "exact":
        return max(scale, 2.0**-126)
    mantissa, exponent = math.frexp(max(scale, float32(SMALLEST_SCALE_INPUT)))
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)


def v32_encode(row: Sequence[float], scale_rounding: str = "power_of_two") -> bytes:
    """Encode 576 float32 values to 656 bytes: 512 e4m3, four float32 scales, 64 bf16."""
    latent, rope = row[:V32_LATENT], row[V32_LATENT:]
    values, scales = _quantize(latent, V32_TILE, scale_rounding)
    return values + b"".join(struct.pack("<f", scale) for scale in scales) + b"".join(map(bf16_bytes, rope))


def v32_decode(record: bytes) -> list[float]:
    scales = struct.unpack("<4f", record[512:528])
    latent = [float32(E4M3_VALUES[byte] * scales[i // V32_TILE]) for i, byte in enumerate(record[:V32_LATENT])]
    return latent + bf16_values(record[528:656])


def model1_encode_page(rows: Sequence[Sequence[float]]) -> bytes:
    """Encode a page of 512-wide rows: 448 e4m3 and 64 bf16 of each token, then seven E8M0 scales and a zero of each."""
    data, scale_rows = b"", b""
    for row in rows:
        values, scales = _quantize(row[:MODEL1_LATENT], MODEL1_TILE, "power_of_two")
        data += values + b"".join(map(bf16_bytes, row[MODEL1_LATENT:]))
        scale_rows += bytes(e8m0_encode(scale) for scale in scales) + b"\0"
    return data + scale_rows


def model1_decode_page(page: bytes, page_size: int) -> list[list[float]]:
    rows = []
    for token in range(page_size):
        data = page[576 * token : 576 * (token + 1)]
        scales = [e8m0_decode(byte) for byte in page[576 * page_size + 8 * token :][:7]]
        latent = [E4M3_VALUES[byte] * scales[i // MODEL1_TILE] for i, byte in enumerate(data[:MODEL1_LATENT])]
        rows.append(latent + bf16_values(data[MODEL1_LATENT:]))
    return rows


E2M1_VALUES = [sign * magnitude for sign in (1.0, -1.0) for magnitude in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]


def e2m1_encode(x: float) -> int:
    """The code of the nearest value, ties to even; saturates at ±6, NaN becomes 0."""
    if math.isnan(x):
        return 0
    code = min(range(8), key=lambda code: (abs(E2M1_VALUES[code] - min(abs(x), 6.0)), code % 2))
    return code | (8 if math.copysign(1.0, x) < 0 else 0)


def nvfp4_scale(block: Sequence[float], rounds_up: bool) -> int:
    """amax / 6 as an e4m3 byte, at least 2^-9, rounded to nearest or up; NaN if a value is NaN or infinite."""
    if not all(math.isfinite(x) for x in block):
        return 0x7F
    scale = min(max(float32(max(abs(x) for x in block) / 6.0), 2.0**-9), E4M3_MAX)
    if rounds_up:
        return bisect_left(_POSITIVE, scale)
    return e4m3_encode(scale)


def v41_encode(row: Sequence[float]) -> bytes:
    """Encode 512 float32 values to 528 bytes: 512 e4m3, then sixteen E8M0 scales."""
    values, scales = _quantize(row, V41_BLOCK, "power_of_two")
    return values + bytes(e8m0_encode(scale) for scale in scales)


def v41_decode(record: bytes) -> list[float]:
    scales = [e8m0_decode(byte) for byte in record[512:528]]
    return [E4M3_VALUES[byte] * scales[i // V41_BLOCK] for i, byte in enumerate(record[:512])]


def v41_fp4_encode(row: Sequence[float]) -> bytes:
    """Encode 512 float32 values to 288 bytes: e2m1 pairs, then 32 e4m3 scales."""
    values, scales = _quantize_fp4(row, rounds_up=False)
    return values + bytes(scales)


def v41_fp4_decode(record: bytes) -> list[float]:
    return _dequantize_fp4(record[:256], record[256:288])


def nvfp4_encode(row: Sequence[float]) -> bytes:
    """Encode 576 float32 values to 352 bytes: 512 as e2m1 pairs, 64 e4m3, then 32 e4m3 scales, transposed."""
    values, scales = _quantize_fp4(row[:512], rounds_up=True)
    rope = bytes(map(e4m3_encode, row[512:]))
    # Byte p is the scale of block 4 · (p % 8) + p // 8.
    return values + rope + bytes(scales[4 * (p % 8) + p // 8] for p in range(32))


def nvfp4_decode(record: bytes) -> list[float]:
    scales = bytes(record[320 + 8 * (block % 4) + block // 4] for block in range(32))
    return _dequantize_fp4(record[:256], scales) + [E4M3_VALUES[byte] for byte in record[256:320]]


def _quantize_fp4(row: Sequence[float], rounds_up: bool) -> tuple[bytes, list[int]]:
    codes, scales = [], []
    for begin in range(0, len(row), NVFP4_BLOCK):
        block = row[begin : begin + NVFP4_BLOCK]
        scales.append(nvfp4_scale(block, rounds_up))
        codes += [e2m1_encode(float32(x / E4M3_VALUES[scales[-1]])) for x in block]
    return bytes(low | high << 4 for low, high in zip(codes[0::2], codes[1::2], strict=True)), scales


def _dequantize_fp4(pairs: bytes, scales: bytes) -> list[float]:
    codes = [code for byte in pairs for code in (byte & 0xF, byte >> 4)]
    return [E2M1_VALUES[code] * E4M3_VALUES[scales[i // NVFP4_BLOCK]] for i, code in enumerate(codes)]


def _quantize(row: Sequence[float], tile: int, scale_rounding: str) -> tuple[bytes, list[float]]:
    values, scales = bytearray(), []
    for begin in range(0, len(row), tile):
        block = row[begin : begin + tile]
        scale = tile_scale(block, scale_rounding)
        values += bytes(e4m3_encode(float32(x / scale)) for x in block)
        scales.append(scale)
    return bytes(values), scales
