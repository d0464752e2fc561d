"""Rows that are hard for top-k, by name: ties, NaN, values in one radix bin, values correlated with their positions."""

from __future__ import annotations

import torch

KINDS = (
    "normal",
    "equal",
    "one bin",
    "concentrated",
    "subnormal",
    "zeros",
    "sorted",
    "reversed",
    "infinite",
    "nan",
    "mostly zero",
    "spikes where the sample is not",
    "in one place",
)


def rows_of(kind: str, rows: int, width: int, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """float32 [rows, width]."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, width, generator=generator, device=device)
    draw = torch.randint(0, 2**31 - 1, (rows, width), generator=generator, dtype=torch.int32, device=device)
    column = torch.arange(width, device=device).expand(rows, -1)
    if kind == "equal":
        return torch.full_like(x, 0.25)
    if kind == "one bin":  # float32 of one exponent
        return (0x3F800000 + draw % 2**23).view(torch.float32)
    if kind == "concentrated":
        return 7.0 * (1 + 1e-3 * x.sigmoid())
    if kind == "subnormal":
        return (draw % 300).view(torch.float32) * x.sign()
    if kind == "zeros":
        return torch.where(draw % 2 == 0, 0.0, -0.0)
    if kind == "sorted":
        return x.sort(dim=1).values
    if kind == "reversed":
        return x.sort(dim=1, descending=True).values
    if kind == "infinite":
        return torch.tensor([-torch.inf, torch.inf, 1.0, -1.0], device=device)[draw % 4]
    if kind == "nan":
        return x.masked_fill(draw % 3 == 0, torch.nan)
    if kind == "mostly zero":
        return x.masked_fill(draw % 10 != 0, 0.0)
    if kind == "spikes where the sample is not":
        return torch.where(column % 64 < 32, x - 20, x)
    if kind == "in one place":  # more than samples predict
        return torch.where(column < width // 40, x + 6, x)
    assert kind == "normal", f"no rows are called {kind}"
    return x
