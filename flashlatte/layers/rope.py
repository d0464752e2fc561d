"""Rotary embedding: the table of cosines and sines."""

from __future__ import annotations

import functools
import math

import torch

from flashlatte.layers.config import Rope, Yarn


def inverse_frequencies(rope: Rope, rope_dim: int) -> torch.Tensor:
    """theta^(-2i / rope_dim), blended by YaRN with the same over its factor: float32 [rope_dim / 2]."""
    powers = rope.theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32, device="cpu") / rope_dim)
    if rope.yarn is None:
        return 1.0 / powers
    kept = 1 - _ramp(rope.yarn, rope.theta, rope_dim)
    return 1.0 / (rope.yarn.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _ramp(yarn: Yarn, theta: float, rope_dim: int) -> torch.Tensor:
    """How far each frequency is interpolated, from 0 (turns often in the original context) to 1."""

    def dim_that_turns(times: float) -> float:
        return rope_dim * math.log(yarn.original_max_position / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_that_turns(yarn.beta_fast), dim_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope_dim - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(rope_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)


def number(rope: Rope, rope_dim: int) -> int:
    """Which table of ``numbered_table`` these make: the same number for the same embedding."""
    if (rope, rope_dim) not in _NUMBERED:
        _NUMBERED.append((rope, rope_dim))
    return _NUMBERED.index((rope, rope_dim))


def numbered_table(number: int, device: torch.device) -> torch.Tensor:
    """The ``table`` that has this number."""
    return table(*_NUMBERED[number], device)


def inverse_table(number: int, device: torch.device) -> torch.Tensor:
    """``numbered_table`` of the rotation back."""
    return _inverse_table(*_NUMBERED[number], device)


_NUMBERED: list[tuple[Rope, int]] = []

# What torch.compiler.assume_constant_result sets, without importing torch._dynamo: a compiled layer holds a table as
# a constant, where it would otherwise compute it at every call. PyTorch 2.11 takes no dataclass as an argument of such
# a function, hence the numbers.
numbered_table._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
inverse_table._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.lru_cache(maxsize=16)
def table(rope: Rope, rope_dim: int, device: torch.device) -> torch.Tensor:
    """Cosines and sines of all positions, float32 [max_position, rope_dim]; one for all layers of a model."""
    # A table made in inference mode could not serve a graph that is captured outside of it.
    with torch.inference_mode(False):
        positions = torch.arange(rope.max_position, dtype=torch.float32, device="cpu")
        angles = positions[:, None] * inverse_frequencies(rope, rope_dim)
        scale = 1.0 if rope.yarn is None else rope.yarn.rotation_scale
        return _of_known_sizes((torch.cat((angles.cos(), angles.sin()), dim=-1) * scale).to(device))


@functools.lru_cache(maxsize=16)
def _inverse_table(rope: Rope, rope_dim: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        cosines, sines = table(rope, rope_dim, device).chunk(2, dim=-1)
        return _of_known_sizes(torch.cat((cosines, -sines), dim=-1))


def _of_known_sizes(x: torch.Tensor) -> torch.Tensor:
    """x, whose sizes are known also in what is compiled for any (``dynamic=True``), where a constant's would not be.

    ``torch._dynamo.mark_static`` without importing torch._dynamo.
    """
    x._dynamo_static_indices = set(range(x.dim()))  # pyright: ignore[reportAttributeAccessIssue]
    return x
