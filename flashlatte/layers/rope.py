"""Rotary embedding: tables of cosines and sines."""

from __future__ import annotations

import functools
import math

import torch

from flashlatte.layers import models
from flashlatte.layers.rope_config import Rope, Yarn


def inverse_frequencies(rope: Rope, rope_dim: int) -> torch.Tensor:
    """theta^(-2i / rope_dim), float32 [rope_dim / 2]; YaRN blends it with the same divided by its factor."""
    powers = rope.theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32, device="cpu") / rope_dim)
    if rope.yarn is None:
        return 1.0 / powers
    blend = 1 - _ramp(rope.yarn, rope.theta, rope_dim)
    return 1.0 / (rope.yarn.factor * powers) * (1 - blend) + 1.0 / powers * blend


def _ramp(yarn: Yarn, theta: float, rope_dim: int) -> torch.Tensor:
    """Interpolation weight of each frequency, from 0 (many rotations in the original context) to 1."""

    def dim_with_rotations(rotations: float) -> float:
        return rope_dim * math.log(yarn.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_with_rotations(yarn.beta_fast), dim_with_rotations(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope_dim - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(rope_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)


def table_id(rope: Rope, rope_dim: int) -> int:
    """The id of an embedding's table in this process, for ``rotary_table``; equal embeddings have equal ids."""
    if (rope, rope_dim) not in _TABLE_KEYS:
        _TABLE_KEYS.append((rope, rope_dim))
    return _TABLE_KEYS.index((rope, rope_dim))


def rotary_table(table_id: int, device: torch.device) -> torch.Tensor:
    """The ``table`` with this id."""
    return table(*_TABLE_KEYS[table_id], device)


def inverse_table(table_id: int, device: torch.device) -> torch.Tensor:
    """The table of the inverse rotation."""
    return _inverse_table(*_TABLE_KEYS[table_id], device)


_TABLE_KEYS: list[tuple[Rope, int]] = []

# What torch.compiler.assume_constant_result sets, without importing torch._dynamo: a compiled layer treats a table as a
# constant instead of computing it in every call. PyTorch 2.11 allows no dataclass arguments here, hence the ids.
rotary_table._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
inverse_table._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.lru_cache(maxsize=16)
def table(rope: Rope, rope_dim: int, device: torch.device) -> torch.Tensor:
    """Cosines and sines of all positions, float32 [max_position, rope_dim]; layers share a table.

    Without a rotation it has one row, that of angle 0: operations clamp positions to the table.
    """
    # A table created in inference mode could not be used in a graph captured outside of it.
    with torch.inference_mode(False):
        return _with_static_shape(torch.cat(_cosines_and_sines(rope, rope_dim), dim=-1).to(device))


def _cosines_and_sines(rope: Rope, rope_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [positions, rope_dim / 2] each, on the CPU.

    Tables are computed there, since a copy to a device returns when it is complete: another thread may read the cached
    table on another stream.
    """
    if rope.layout == models.UNROTATED:
        cosines, sines = unrotated_table(rope_dim, torch.device("cpu")).chunk(2, dim=-1)
        return cosines, sines
    positions = torch.arange(rope.max_position, dtype=torch.float32, device="cpu")
    angles = positions[:, None] * inverse_frequencies(rope, rope_dim)
    scale = 1.0 if rope.yarn is None else rope.yarn.rotation_scale
    return angles.cos() * scale, angles.sin() * scale


@functools.lru_cache(maxsize=16)
def unrotated_table(rope_dim: int, device: torch.device) -> torch.Tensor:
    """The table [1, rope_dim] of no rotation: cosines 1, sines 0."""
    # A tensor created in inference mode could not be used outside of it.
    with torch.inference_mode(False):
        return (torch.arange(rope_dim, device="cpu") < rope_dim // 2).float()[None].to(device)


@functools.lru_cache(maxsize=16)
def _inverse_table(rope: Rope, rope_dim: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        cosines, sines = _cosines_and_sines(rope, rope_dim)
        return _with_static_shape(torch.cat((cosines, -sines), dim=-1).to(device))


def _with_static_shape(x: torch.Tensor) -> torch.Tensor:
    """Mark the shape of x as static for torch.compile, also with ``dynamic=True``.

    It does what ``torch._dynamo.mark_static`` does, without importing torch._dynamo.
    """
    x._dynamo_static_indices = set(range(x.dim()))  # pyright: ignore[reportAttributeAccessIssue]
    return x
