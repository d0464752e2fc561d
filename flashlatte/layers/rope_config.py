"""Configuration of a rotary embedding, and of the factors of queries that depend on positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flashlatte.layers import models
from flashlatte.runtime import checks

if TYPE_CHECKING:
    import torch

MAX_POSITIONS = 2**24
LAYOUTS = (models.INTERLEAVED, models.HALF, models.UNROTATED)


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv:2309.00071) as DeepSeek and transformers compute it.

    Attributes:
        factor: length of the context relative to the original one.
        original_max_position: length of the context before extension.
        beta_fast, beta_slow: frequencies are blended that rotate between beta_slow and beta_fast times over the
            original context.
        mscale, mscale_all_dim: cos and sin are scaled by get_mscale(factor, mscale) / get_mscale(factor,
            mscale_all_dim), and the softmax scale by the square of get_mscale(factor, mscale_all_dim).
        attention_factor: scale of cos and sin; None: from mscale and mscale_all_dim.
        truncate: whether the bounds of the blended range are rounded to whole dims.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        checks.positive_int("original_max_position", self.original_max_position)
        for name in ("factor", "beta_fast", "beta_slow"):
            checks.positive_number(name, getattr(self, name))
        for name in ("mscale", "mscale_all_dim"):
            checks.finite(name, getattr(self, name))
        if self.attention_factor is not None:
            checks.positive_number("attention_factor", self.attention_factor)
        checks.flag("truncate", self.truncate)

    @classmethod
    def from_rope_parameters(cls, parameters: Mapping[str, Any], max_position: int) -> Yarn:
        """Read standardized ``rope_parameters``; a factor of None is ``max_position`` over the original length.

        Raises:
            TypeError, ValueError: a field is not a number in its range.
        """
        name = "original_max_position_embeddings"
        original = checks.positive_int(name, parameters[name])
        factor = parameters.get("factor")
        return cls(
            factor=max_position / original if factor is None else checks.number("factor", factor),
            original_max_position=original,
            beta_fast=parameters.get("beta_fast") or 32.0,
            beta_slow=parameters.get("beta_slow") or 1.0,
            mscale=parameters.get("mscale") or 0.0,
            mscale_all_dim=parameters.get("mscale_all_dim") or 0.0,
            attention_factor=parameters.get("attention_factor"),
            truncate=parameters.get("truncate", True),
        )

    @property
    def rotation_scale(self) -> float:
        """The factor of cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return get_mscale(self.factor, self.mscale) / get_mscale(self.factor, self.mscale_all_dim)
        return get_mscale(self.factor, 1.0)

    @property
    def softmax_factor(self) -> float:
        """The factor of the softmax scale."""
        return get_mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def of_rotation(self) -> Yarn:
        """The same rotation, with a softmax factor of 1."""
        return replace(self, attention_factor=self.rotation_scale, mscale=0.0, mscale_all_dim=0.0)


def get_mscale(factor: float, mscale: float) -> float:
    """0.1 · mscale · ln(factor) + 1, and 1 for a factor up to 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class Rope:
    """A rotary embedding.

    Attributes:
        theta: base of the frequencies.
        layout: the dims that frequency i rotates: "interleaved" 2i and 2i + 1, "half" i and i + dim / 2; "none": no
            dim is rotated (NoPE, Kimi Linear, arXiv:2510.26692, §4.1).
        max_position: positions 0 to max_position - 1 are supported; at most 2^24, because float32 has no odd integers
            above.
        yarn: extension of the context, or None.
    """

    theta: float = 10000.0
    layout: str = "interleaved"
    max_position: int = 4096
    yarn: Yarn | None = None

    def __post_init__(self) -> None:
        checks.choice("layout", self.layout, LAYOUTS)
        checks.positive_int("max_position", self.max_position, maximum=MAX_POSITIONS)
        checks.instance("yarn", self.yarn, Yarn, or_none=True)
        if not 1 < checks.number("theta", self.theta) < math.inf:
            raise ValueError(f"theta must be a finite number above 1, got {self.theta}")

    @classmethod
    def from_rope_parameters(cls, parameters: Mapping[str, Any], layout: str, max_position: int) -> Rope:
        """Read standardized ``rope_parameters`` (``models.standardized_rope``).

        Raises:
            TypeError, ValueError: a field is not a number in its range.
        """
        has_yarn = layout != models.UNROTATED and parameters["rope_type"] == "yarn"
        with checks.naming(theta="rope_theta", max_position="max_position_embeddings"):
            return cls(
                theta=checks.number("rope_theta", parameters["rope_theta"]),
                layout=layout,
                max_position=max_position,
                yarn=Yarn.from_rope_parameters(parameters, max_position) if has_yarn else None,
            )


@dataclass(frozen=True)
class QueryScaling:
    """Queries at position p are multiplied by 1 + beta · log(1 + ⌊p / original_max_position⌋) (Llama 4, Mistral 4).

    Attributes:
        beta: 0 or above.
        original_max_position: positions below it have factor 1.
    """

    beta: float
    original_max_position: int

    def __post_init__(self) -> None:
        if checks.number("beta", self.beta) < 0 or not math.isfinite(self.beta):
            raise ValueError(f"beta must be a finite number from 0, got {self.beta}")
        checks.positive_int("original_max_position", self.original_max_position)

    def factors(self, positions: torch.Tensor) -> torch.Tensor:
        """float32 factors of int positions [...]."""
        # In true division the result would have the default dtype, and bf16 cannot represent 8191 / 8192.
        return 1 + self.beta * (1 + positions // self.original_max_position).float().log()

    @classmethod
    def from_rope_parameters(cls, rope: Mapping[str, Any]) -> QueryScaling:
        """Read ``rope_parameters`` of a transformers config.

        Raises:
            ValueError: a missing field.
        """
        names = "llama_4_scaling_beta", "original_max_position_embeddings"
        if missing := [name for name in names if rope.get(name) is None]:
            raise ValueError(f"rope_parameters must have {', '.join(missing)}, got {dict(rope)}")
        with checks.naming(beta=names[0], original_max_position=names[1]):
            return cls(*(rope[name] for name in names))
