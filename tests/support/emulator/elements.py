"""Number formats of PTX in NumPy. A value is an array of a warp's 32 lanes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

LANES = 32
LANE = np.arange(LANES)
TYPES: dict[str, Any] = {
    "pred": np.bool_,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "bf16": np.uint16,
    "bf16x2": np.uint32,
    "f16x2": np.uint32,
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}").type for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}").type for bits in (8, 16, 32, 64)},
}
# Dtype of the storage of a register, by its number of bits.
STORED: dict[int, Any] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}

Array = Any


def type_of(modifiers: list[str]) -> str:
    """The last type among the modifiers."""
    found = [modifier for modifier in modifiers if modifier in TYPES]
    if not found:
        raise NotImplementedError(".".join(modifiers))
    return found[-1]


def spread(value: Array) -> Array:
    return np.broadcast_to(value, (LANES,))


def from_bf16(x: Array) -> Array:
    """uint16 to float32."""
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x: Array) -> Array:
    """float32 to uint16, rounded to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(np.uint16))


def from_f16(x: Array) -> Array:
    return np.asarray(x, np.uint16).view(np.float16).astype(np.float32)


def to_f16(x: Array) -> Array:
    return np.asarray(x).astype(np.float16).view(np.uint16)


_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def from_e4m3(x: Array) -> Array:
    return _E4M3[x]


def to_e4m3(x: Array) -> Array:
    """float32 to uint8, saturated to 448."""
    clamped = torch.from_numpy(np.array(x, np.float32)).clamp(-448, 448)
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def from_tf32(x: Array) -> Array:
    return x.view(np.float32)


FROM: dict[str, Any] = {"bf16": from_bf16, "f16": from_f16, "e4m3": from_e4m3, "tf32": from_tf32}
TO: dict[str, Any] = {"bf16": to_bf16, "f16": to_f16}
BYTES = {"bf16": 2, "f16": 2, "e4m3": 1, "tf32": 4}


def pack(low: Array, high: Array) -> Array:
    """Two uint16 to uint32."""
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def halves(x: Array) -> tuple[Array, Array]:
    return (x & np.uint32(0xFFFF)).astype(np.uint16), (x >> np.uint32(16)).astype(np.uint16)


def literal(text: str, dtype: Any) -> Any:
    """A literal operand as a scalar of ``dtype``."""
    if text[:2].lower() == "0f":
        value: Any = np.uint32(int(text[2:], 16)).view(np.float32)
    elif text[:2].lower() == "0d":
        value = np.uint64(int(text[2:], 16)).view(np.float64)
    else:
        value = int(text.rstrip("U"), 0)
    if dtype is np.bool_:
        return np.bool_(value)
    kind = np.dtype(dtype)
    if isinstance(value, int):
        if kind.kind == "f":
            return dtype(value)
        bits = 8 * kind.itemsize
        return np.uint64(value & (2**bits - 1)).astype(f"u{kind.itemsize}").view(dtype)
    return value.astype(dtype) if kind.kind == "f" else value.view(dtype)
