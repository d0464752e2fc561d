"""``cvt``: conversions between number formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from support.emulator.elements import FROM, TO, TYPES, Array, from_e4m3, pack, spread, to_e4m3, to_f16

_PAIRS = ("e4m3x2", "e5m2x2", "e2m1x2")
_ROUNDINGS = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}


def conversion(modifiers: list[str]) -> tuple[Callable[..., Array], list[Any]]:
    to, source = [modifier for modifier in modifiers if modifier in (*TYPES, *_PAIRS, "tf32")][-2:]
    positive: Callable[[Array], Array] = (lambda x: np.maximum(x, 0)) if "relu" in modifiers else lambda x: x
    if source == "f32" and to in ("bf16x2", "f16x2"):
        down = TO[to.removesuffix("x2")]
        return (lambda high, low: pack(down(positive(spread(low))), down(positive(spread(high))))), [np.float32] * 2
    if source == "f32" and to == "e4m3x2":
        return _e4m3_pair, [np.float32] * 2
    if source == "e4m3x2" and to == "f16x2":
        return _f16_pair, [np.uint16]
    if source == "f32" and to == "tf32":
        return (lambda a: (a.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)), [np.float32]
    if source in ("bf16", "f16"):
        up = FROM[source]
        if to != "f32" and to not in TO:
            raise NotImplementedError(f"cvt.{'.'.join(modifiers)}")
        down = TO.get(to, lambda x: x)
        return (lambda a: down(up(spread(a)))), [np.uint16]
    if to in TO:
        return (lambda a: TO[to](positive(np.asarray(a, np.float32)))), [TYPES[source]]
    if source in _PAIRS or to in _PAIRS:
        raise NotImplementedError(f"cvt.{'.'.join(modifiers)}")
    return _plain(modifiers, TYPES[to], TYPES[source])


def _e4m3_pair(high: Array, low: Array) -> Array:
    return to_e4m3(spread(low)).astype(np.uint16) | (to_e4m3(spread(high)).astype(np.uint16) << np.uint16(8))


def _f16_pair(pair: Array) -> Array:
    return pack(to_f16(from_e4m3(pair & np.uint16(255))), to_f16(from_e4m3(pair >> np.uint16(8))))


def _plain(modifiers: list[str], to: Any, source: Any) -> tuple[Callable[..., Array], list[Any]]:
    """Between integers and floating-point numbers of 32 and 64 bits."""
    rounding = next((_ROUNDINGS[modifier] for modifier in modifiers if modifier in _ROUNDINGS), None)
    integer = np.dtype(to).kind != "f"

    def convert(a: Array) -> Array:
        a = spread(a)
        if a.dtype.kind == "f" and rounding is not None:
            a = rounding(a)
        if integer and (a.dtype.kind == "f" or "sat" in modifiers):
            limits = np.iinfo(to)
            # Not a number converts to 0.
            a = np.clip(
                np.nan_to_num(a, nan=0.0).astype(np.float64) if a.dtype.kind == "f" else a, limits.min, limits.max
            )
            if limits.bits == 64 and a.dtype.kind == "f":
                return np.array([min(max(int(x), limits.min), limits.max) for x in a], to)
        return a.astype(to)

    return convert, [source]
