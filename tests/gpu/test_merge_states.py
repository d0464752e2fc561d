"""``merge_states`` on a GPU: every backend compared with the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu import harness
from gpu.harness import DEVICE, Arguments

import flashlatte
from flashlatte.testing import compare
from flashlatte.testing.draws import Draw

pytestmark = pytest.mark.gpu

BACKEND = "portable"
GRID = harness.pairwise(
    {
        "parts": (2, 3, 8, 40),
        "shape": ((), (1,), (5, 128), (2, 3, 16), (301, 16)),
        "width": (1, 48, 512, 1025),
        "dtype": (torch.bfloat16, torch.float16, torch.float32),
        "stacked": (False, True),
        "strided": (False, True),
        "empty": ("none", "some", "all"),
    }
)
FLOAT32_LSE = compare.Tolerance(2e-6, 2e-6)
TOLERANCES = {
    torch.bfloat16: compare.Tolerance(1e-3, 2.01 / 256, 1e-5),
    torch.float16: compare.Tolerance(1e-3, 2.01 / 2048, 1e-6),
    torch.float32: compare.FLOAT32,
}


@pytest.mark.parametrize("row", GRID, ids=harness.ids(GRID))
def test_grid(row: Arguments) -> None:
    outs, lses = parts_of(**row)
    out = torch.full(outs[0].shape, torch.nan, dtype=outs[0].dtype, device=DEVICE)
    lse = torch.full(lses[0].shape, torch.nan, device=DEVICE)
    merge(outs, lses, out=out, lse=lse)
    assert_right(out, lse, outs, lses)


@pytest.mark.parametrize("parts", [8, 9, 17, 40])
@pytest.mark.parametrize("lse", [0.0, 5000.0])
def test_float32_is_as_exact_as_float32(parts: int, lse: float) -> None:
    outs, lses = parts_of(parts=parts, shape=(7, 3), width=1025, dtype=torch.float32)
    lses = [part / 10 + lse for part in lses]
    exact = torch.stack(lses).double()
    out, merged_lse = merge(outs, lses)
    expected = (exact.softmax(dim=0).unsqueeze(-1) * torch.stack(list(outs)).double()).sum(dim=0)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=5e-6)
    torch.testing.assert_close(merged_lse.double(), exact.logsumexp(dim=0), rtol=2**-22, atol=2e-6)


def test_more_than_2_31_elements() -> None:
    draw = Draw(0, DEVICE)
    rows = 2**31 // 512 + 5000
    outs = [draw.normal(rows, 512, dtype=torch.bfloat16) for _ in range(2)]
    lses = [draw.normal(rows, dtype=torch.float32, factor=3.0) for _ in range(2)]
    out, lse = merge(outs, lses)
    some = torch.cat([torch.arange(begin, begin + 100, device=DEVICE) for begin in (0, rows // 2, rows - 100)])
    assert_right(out[some], lse[some], [part[some] for part in outs], [part[some] for part in lses])


@pytest.mark.parametrize("parts", [2, 9])
@pytest.mark.parametrize("on_device", [False, True])
def test_tokens_without_context_and_e4m3(parts: int, on_device: bool) -> None:
    outs, lses = parts_of(parts=parts, shape=(301, 16), width=128, empty="some")
    tensors = [torch.tensor(value, device=DEVICE) for value in (100, 0.25)]
    context, scale = tensors if on_device else (100, 0.25)
    out, lse = merge(outs, lses, context_tokens=context, out_scale=scale)
    expected, expected_lse = flashlatte.merge_states(
        outs, lses, context_tokens=context, out_scale=scale, backend="reference"
    )
    # Another order of summation may round to the adjacent e4m3 value, with 3 bits.
    compare.assert_close(out.float(), expected.float(), compare.Tolerance(2.0**-6, 0.126, 1e-5), "out")
    compare.assert_close(lse, expected_lse, FLOAT32_LSE, "lse")
    assert lse[100:].equal(lses[-1][100:])


def test_graph_follows_its_context() -> None:
    outs, lses = parts_of(parts=2, shape=(301, 16), width=128)
    context = torch.tensor(301, device=DEVICE)
    replay, (out, _) = harness.captured(lambda: merge(outs, lses, context_tokens=context))
    for tokens in (0, 17, 301):
        context.fill_(tokens)
        replay()
        assert out[tokens:].equal(outs[-1][tokens:])
        expected, _ = flashlatte.merge_states(outs, lses, context_tokens=tokens, backend="reference")
        compare.assert_close(out, expected, TOLERANCES[out.dtype], "out")


def test_same_bits_run_after_run() -> None:
    outs, lses = parts_of(parts=7, shape=(300, 128), width=512)
    out, lse = merge(outs, lses)
    for _ in range(3):
        again_out, again_lse = merge(outs, lses)
        harness.assert_same_bits({"out": out, "lse": lse}, {"out": again_out, "lse": again_lse})


def test_graph_follows_its_parts() -> None:
    outs, lses = parts_of(parts=3, shape=(20, 128), width=512)
    replay, (out, lse) = harness.captured(lambda: merge(outs, lses))
    for factor in (1.0, -2.0):
        for part, part_lse in zip(outs, lses, strict=True):
            part.mul_(factor)
            part_lse.mul_(factor)
        out.fill_(torch.nan)
        replay()
        assert_right(out, lse, outs, lses)


def test_new_shapes_compile_nothing() -> None:
    for rows in (1, 4096):
        merge(*parts_of(parts=2, shape=(rows, 128), width=512))
    with harness.no_compilation():
        for rows in range(2, 1000, 50):
            merge(*parts_of(parts=2, shape=(rows, 128), width=512))


def test_compiles_as_one_graph() -> None:
    outs, lses = parts_of(parts=3, shape=(20, 16), width=512)
    merge(outs, lses)

    def merged(first: torch.Tensor) -> torch.Tensor:
        out, lse = flashlatte.merge_states([first, *outs[1:]], lses, backend=BACKEND)
        return out.float() + lse.unsqueeze(-1)

    harness.assert_compiles(merged, outs[0])


def parts_of(
    *,
    parts: int,
    shape: tuple[int, ...],
    width: int,
    dtype: torch.dtype = torch.bfloat16,
    stacked: bool = False,
    strided: bool = False,
    empty: str = "none",
) -> tuple[list[torch.Tensor] | torch.Tensor, list[torch.Tensor] | torch.Tensor]:
    """Random parts; empty ones have an lse of inf or -inf and NaN in out."""
    draw = Draw(0, DEVICE)
    storage = draw.normal(parts, *shape, width + (3 if strided else 0), dtype=dtype)
    outs = storage[..., :width]
    lses = draw.normal(parts, *shape, dtype=torch.float32).mul_(30)
    if empty != "none":
        chance = 2 if empty == "all" else 0.4
        hidden = draw.uniform(*lses.shape) < chance
        if shape:
            hidden[..., -1] = True
        lses[hidden] = torch.where(draw.uniform(*lses.shape) < 0.5, torch.inf, -torch.inf)[hidden]
        outs[hidden] = torch.nan
    return (outs, lses) if stacked else (list(outs.unbind(0)), list(lses.unbind(0)))


def merge(*arguments: Any, **outputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with harness.refusals_skip(BACKEND):
        return flashlatte.merge_states(*arguments, **outputs, backend=BACKEND)


def assert_right(out: torch.Tensor, lse: torch.Tensor, outs: Any, lses: Any) -> None:
    expected_out, expected_lse = flashlatte.merge_states(outs, lses, backend="reference")
    compare.assert_close(out, expected_out, TOLERANCES[out.dtype], "out")
    compare.assert_close(lse, expected_lse, FLOAT32_LSE, "lse")
