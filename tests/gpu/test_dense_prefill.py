# Keyword arguments and boundaries are built in containers of any length.
# pyright: reportArgumentType=false, reportCallIssue=false

"""Dense prefill on a GPU, forward and backward: every backend compared with the reference, and other guarantees."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from gpu import harness
from gpu.harness import DEVICE, Arguments, Results

import flashlatte
from flashlatte.kernels.softmax import attend
from flashlatte.runtime import ragged
from flashlatte.testing import compare, oracles
from flashlatte.testing.cases import DensePrefillCase
from flashlatte.testing.draws import Draw

pytestmark = pytest.mark.gpu

ROWS = ("q", "k", "v")
# Of FlashMLA's tests.
FLASHMLA_GRID = harness.pairwise(
    {
        "tokens": (4096, 8192),
        "heads": ((128, 128), (32, 4), (16, 1)),
        "head_dim": (192, 128),
        "causal": (False, True),
        "varlen": (False, True),
    }
)
# Few kinds, as kernels are compiled for each.
KINDS = {
    "causal": {"causal": True},
    "full": {},
    "128": {"causal": True, "head_dim": 128},
    "window": {"causal": True, "window": 100},
    "window on both sides": {"window": (64, 200), "head_dim": 128, "dtype": torch.float16},
    "odd widths": {"causal": True, "head_dim": 36, "d_v": 20, "index_dtype": torch.int64},
    "narrow": {"causal": True, "head_dim": 24, "d_v": 12},
    "narrow values": {"head_dim": 64, "d_v": 20},
}
SMALL_GRID = harness.pairwise(
    {
        "kind": tuple(KINDS),
        "h_q, h_kv": ((1, 1), (4, 4), (6, 2), (5, 1)),
        "s_q, s_k": ((1, 1), (1, 300), (300, 1), (129, 127), (700, 400), (400, 700)),
        "zero_lengths": (False, True),
        "unowned": (0, 70),
        "strided": (False, True),
    }
)
ORACLE_CASES = (
    DensePrefillCase(2, 30, 90, 2, 1, causal=True, varlen=True),
    DensePrefillCase(2, 40, 40, 2, 2, head_dim=128, varlen=True),
)
# All errors of a large gradient together, compared with those that rounding alone makes: so many independent ones that
# their sum hardly varies. Rounding the parts of 16 heads before their sum makes it 1.16 to 1.22.
LARGEST_NOISE = 1.1
ON_EVERY_BACKEND = pytest.mark.parametrize("backend", harness.KERNEL_BACKENDS)
TYPICAL = DensePrefillCase(5, 500, 600, 8, 4, causal=True, varlen=True, zero_lengths=True, unowned=3)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("row", FLASHMLA_GRID, ids=harness.ids(FLASHMLA_GRID))
def test_flashmla_grid(row: Arguments, backend: str) -> None:
    fields = {name: value for name, value in row.items() if name not in ("tokens", "heads")}
    (h_q, h_kv), tokens = row["heads"], row["tokens"]
    case = DensePrefillCase(2, tokens, tokens, h_q, h_kv, **fields)
    check(case.inputs(DEVICE), backend, LARGEST_NOISE)


@ON_EVERY_BACKEND
def test_the_check_detects_sums_rounded_head_by_head(backend: str) -> None:
    """Gradients of keys shared by many query heads, with each head's part rounded before the sum, must be rejected."""
    case = DensePrefillCase(2, 1024, 1024, 16, 1, causal=True)
    arguments = case.inputs(DEVICE)
    gradients = gradients_for(arguments)
    results = prefill(arguments, backend, gradients)
    assert_right(results, arguments, gradients, backend, LARGEST_NOISE)
    of_heads = arguments | {name: arguments[name].repeat(1, case.h_q, 1) for name in ("k", "v")}
    parts = prefill(of_heads, backend, gradients)
    for name in ("dk", "dv"):
        rounded_sum = parts[name].float().sum(dim=1, keepdim=True).to(results[name].dtype)
        with pytest.raises(AssertionError, match=f"^{name}: all errors together"):
            assert_right(results | {name: rounded_sum}, arguments, gradients, backend, LARGEST_NOISE)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("row", SMALL_GRID, ids=harness.ids(SMALL_GRID))
def test_small_shapes(row: Arguments, backend: str) -> None:
    fields = {name: value for name, value in row.items() if "," not in name and name != "kind"} | KINDS[row["kind"]]
    case = DensePrefillCase(4, *row["s_q, s_k"], *row["h_q, h_kv"], varlen=True, **fields)
    check(case.inputs(DEVICE), backend)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("case", ORACLE_CASES, ids=str)
def test_error_against_float64(case: DensePrefillCase, backend: str) -> None:
    arguments = case.inputs(DEVICE)
    gradients = gradients_for(arguments)
    results = prefill(arguments, backend, gradients)
    # Leaves with more bits: the oracle sums a row's gradient token by token, in the dtype of the leaf.
    oracle, baseline = (
        differentiated(
            oracles.dense_prefill,
            arguments | {name: arguments[name].to(leaf) for name in ROWS},
            gradients,
            dtype=dtype,
        )
        for dtype, leaf in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32))
    )
    for name in ("out", "dq", "dk", "dv"):
        compare.assert_accurate(results[name], oracle[name], baseline[name], name)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("deterministic", [False, True])
def test_same_bits_run_after_run(backend: str, deterministic: bool) -> None:
    arguments = TYPICAL.inputs(DEVICE)
    gradients = gradients_for(arguments)
    first = prefill(arguments, backend, gradients, deterministic=deterministic)
    for _ in range(4):
        again = prefill(arguments, backend, gradients, deterministic=deterministic)
        if not deterministic and backend == "hopper":
            del again["dq"]
        harness.assert_same_bits({name: first[name] for name in again}, again)


@ON_EVERY_BACKEND
def test_lengths_that_are_not_true(backend: str) -> None:
    """Nothing outside of the tensors is read or written, and existing rows are correct."""
    arguments = replace(TYPICAL, zero_lengths=False, unowned=0).inputs(DEVICE)
    tokens_q, tokens_k = arguments["q"].shape[0], arguments["k"].shape[0]
    for name, boundaries in (
        ("cu_seqlens_q", (0, 100, tokens_q + 5000, 2**40, 2**31, 2**62)),
        ("cu_seqlens_k", (-(2**40), 100, 90, tokens_k + 3, 2**33, 2**31 - 1)),
        ("cu_seqlens_q", (2**31, 5, -3, 700, 600, 0)),
    ):
        changed = arguments | {name: torch.tensor(boundaries, device=DEVICE), "max_seqlen_q": 1, "max_seqlen_k": 1}
        results = prefill(changed, backend, gradients_for(changed))
        torch.cuda.synchronize()
        for result in ("out", "dq", "dk", "dv"):
            assert not results[result].isnan().any(), result
    check(arguments | {"max_seqlen_q": 1, "max_seqlen_k": 1}, backend)


@ON_EVERY_BACKEND
def test_rows_without_a_visible_pair_may_be_nan(backend: str) -> None:
    """Queries without visible keys, the gradients of their results, and keys that are visible to no query."""
    arguments = replace(TYPICAL, causal=False, window=(100, 20), zero_lengths=False, unowned=0).inputs(DEVICE)
    gradients = gradients_for(arguments)
    queries, keys = [], []
    lengths = (arguments[name].diff().tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    for s_q, s_k in zip(*lengths, strict=True):
        queries.append(torch.arange(s_q, device=DEVICE) >= s_q - s_k - 20)
        keys.append(torch.arange(s_k, device=DEVICE) >= s_k - s_q - 100)
    in_use = {"q": torch.cat(queries), "k": torch.cat(keys), "v": torch.cat(keys)}
    assert not any(rows.all() for rows in in_use.values())
    runs = []
    for fill in (0.0, torch.nan):
        for name, rows in in_use.items():
            arguments[name][~rows] = fill
        for gradient in gradients:
            gradient[~in_use["q"]] = fill
        runs.append(prefill(arguments, backend, gradients, deterministic=True))
    harness.assert_same_bits(*runs)


@ON_EVERY_BACKEND
def test_graph_follows_lengths(backend: str) -> None:
    arguments = replace(TYPICAL, unowned=0).inputs(DEVICE)
    gradients = gradients_for(arguments)
    boundaries = {name: arguments[name].clone() for name in ("cu_seqlens_q", "cu_seqlens_k")}
    for name in boundaries:
        arguments[name].zero_()
    replay, results = harness.captured(lambda: prefill(arguments, backend, gradients))
    for factor in (1.0, 0.5, 0.7):
        for name, values in boundaries.items():
            arguments[name].copy_(values * factor)
        harness.nan_outputs(**results)
        replay()
        assert_right(results, arguments, gradients, backend)


@ON_EVERY_BACKEND
def test_more_than_2_31_elements(backend: str) -> None:
    tokens, heads = 90_000, 128
    draw = Draw(0, DEVICE)
    arguments: Arguments = {
        "q": draw.normal(tokens, heads, 192, dtype=torch.bfloat16),
        "k": draw.normal(300, heads, 192, dtype=torch.bfloat16),
        "v": draw.normal(300, heads, 128, dtype=torch.bfloat16),
        "cu_seqlens_q": torch.tensor([0, tokens - 200, tokens], device=DEVICE),
        "cu_seqlens_k": torch.tensor([0, 100, 300], device=DEVICE),
        "max_seqlen_q": tokens,
        "max_seqlen_k": 200,
    }
    assert arguments["q"].numel() > 2**31
    with harness.refusals_skip(backend):
        out, lse = flashlatte.dense_prefill(**arguments, backend=backend)
    last = arguments | {
        "q": arguments["q"][-200:],
        "cu_seqlens_q": torch.tensor([0, 0, 200], device=DEVICE),
    }
    expected, expected_lse = flashlatte.dense_prefill(**last, backend="reference")
    compare.assert_close(out[-200:], expected, compare.DENSE_PREFILL_OUT, "out")
    compare.assert_close(lse[-200:], expected_lse, compare.DENSE_PREFILL_LSE, "lse")


@ON_EVERY_BACKEND
def test_new_lengths_compile_nothing(backend: str) -> None:
    rng = random.Random(0)
    for case in (TYPICAL, replace(TYPICAL, batch=1)):
        arguments = case.inputs(DEVICE)
        prefill(arguments, backend, gradients_for(arguments))
    with harness.no_compilation():
        for seed in range(10):
            sizes = (rng.randint(1, 9), rng.randint(1, 600), rng.randint(1, 600))
            arguments = DensePrefillCase(*sizes, 8, 4, causal=True, varlen=True, unowned=seed, seed=seed).inputs(DEVICE)
            prefill(arguments, backend, gradients_for(arguments))


@ON_EVERY_BACKEND
def test_compiles_as_one_graph(backend: str) -> None:
    arguments = TYPICAL.inputs(DEVICE)
    prefill(arguments, backend, gradients_for(arguments))

    def out_plus_lse(q: torch.Tensor) -> torch.Tensor:
        out, lse = flashlatte.dense_prefill(**harness.replaced(arguments, q=q), backend=backend)
        return out.float() + lse.unsqueeze(-1)

    harness.assert_compiles(out_plus_lse, arguments["q"])


@ON_EVERY_BACKEND
def test_chunks_merge_into_the_whole(backend: str) -> None:
    tokens, prefix = 700, 400
    draw = Draw(0, DEVICE)
    q, k, v = (draw.normal(n, 4, d, dtype=torch.bfloat16, factor=f).requires_grad_()
               for n, d, f in ((tokens - prefix, 192, 1.0), (tokens, 192, 1.0), (tokens, 128, 0.1)))  # fmt: skip

    def attend(first: int, end: int, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        boundaries = (torch.tensor([0, n], device=DEVICE, dtype=torch.int32) for n in (q.shape[0], end - first))
        with harness.refusals_skip(backend):
            return flashlatte.dense_prefill(
                q, k[first:end], v[first:end], *boundaries, q.shape[0], end - first, causal=causal, backend=backend
            )

    whole = attend(0, tokens, True)
    parts = (attend(0, prefix, False), attend(prefix, tokens, True))
    merged = flashlatte.merge_states([out for out, _ in parts], [lse for _, lse in parts])
    gradients = [draw.normal(*x.shape, dtype=x.dtype) for x in whole]
    for results in zip(
        (*merged, *torch.autograd.grad(merged, (q, k, v), gradients)),
        (*whole, *torch.autograd.grad(whole, (q, k, v), gradients)),
        ("out", "lse", "dq", "dk", "dv"),
        strict=True,
    ):
        tolerance = compare.Tolerance(2e-3, 8.01 / 128, 2e-5)
        compare.assert_close(results[0], results[1], tolerance, results[2])


def gradients_for(arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    draw = Draw(1, DEVICE)
    shape = (*arguments["q"].shape[:2], arguments["v"].shape[2])
    return draw.normal(*shape, dtype=arguments["q"].dtype), draw.normal(*shape[:2], dtype=torch.float32)


def differentiated(function, arguments: Arguments, gradients: tuple[torch.Tensor, torch.Tensor], **more) -> Results:
    rows = {name: arguments[name].detach().requires_grad_() for name in ROWS}
    out, lse = function(**(arguments | rows), **more)
    of_rows = torch.autograd.grad(
        (out, lse), list(rows.values()), [g.to(x.dtype) for g, x in zip(gradients, (out, lse), strict=True)]
    )
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *of_rows), strict=True))


def prefill(
    arguments: Arguments, backend: str, gradients: tuple[torch.Tensor, torch.Tensor], deterministic: bool = False
) -> Results:
    with harness.refusals_skip(backend):
        return differentiated(
            flashlatte.dense_prefill, arguments, gradients, backend=backend, deterministic=deterministic
        )


def rounded(arguments: Arguments, gradients: tuple[torch.Tensor, torch.Tensor], backend: str) -> Results:
    """The reference's formulas with sums in float32, but rounded where ``backend`` rounds: out, the weights in its sum
    and in dv's, the scores' gradients, and results. The Hopper kernel for d_qk 192 makes these of rounded weights too.

    The error of this is that of 16-bit operands: where a sum cancels, it exceeds any share of the result.
    """
    rows = [arguments[name] for name in ROWS]
    left, right = ragged.window_sides(arguments["window"], arguments["causal"])
    scale, group = arguments["softmax_scale"], rows[0].shape[1] // rows[1].shape[1]
    out, dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (gradients[0], *rows))

    def narrow(x: torch.Tensor) -> torch.Tensor:
        return x.to(rows[0].dtype).float()

    boundaries = zip(*(arguments[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k")), strict=True)
    for (first_q, first_k), (end_q, end_k) in itertools.pairwise(boundaries):
        position = torch.arange(end_q - first_q, device=DEVICE)[:, None] + (end_k - first_k) - (end_q - first_q)
        key = torch.arange(end_k - first_k, device=DEVICE)
        visible = (key >= position - left) & (key <= position + right)
        for head in range(rows[0].shape[1]):
            mine, others = (slice(first_q, end_q), head), (slice(first_k, end_k), head // group)
            q, k, v = (x[at].float() for x, at in zip(rows, (mine, others, others), strict=True))
            dout, dlse = (x[mine].float() for x in gradients)
            wide, _ = attend(q @ k.T * scale, visible)
            weights = narrow(wide)
            out[mine] = narrow(weights @ v)
            delta = (out[mine] * dout).sum(dim=-1) - dlse
            rounded_twice = backend == "hopper" and q.shape[1] == 192
            dscores = narrow((weights if rounded_twice else wide) * (dout @ v.T - delta[:, None])) * scale
            dq[mine] = dscores @ k
            dk[others] += dscores.T @ q
            dv[others] += weights.T @ dout
    return {name: narrow(x) for name, x in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv))}


def assert_right(
    results: Results,
    arguments: Arguments,
    gradients: tuple[torch.Tensor, torch.Tensor],
    backend: str,
    noise: float | None = None,
) -> None:
    """Against the reference on float32 rows, with the errors of ``rounded`` as the measure: no error more than twice
    the largest of them and an ulp, and all together at most ``noise`` times as large as all of them.

    Where that would be long, only the first and the last key head with their query heads.
    """
    heads, kv_heads = arguments["q"].shape[1], arguments["k"].shape[1]
    group = heads // kv_heads
    chosen = sorted({0, kv_heads - 1}) if arguments["q"].shape[0] > 3000 else range(kv_heads)
    for head in chosen:
        mine, kv = slice(head * group, (head + 1) * group), slice(head, head + 1)
        part = arguments | {"q": arguments["q"][:, mine], "k": arguments["k"][:, kv], "v": arguments["v"][:, kv]}
        part_gradients = (gradients[0][:, mine], gradients[1][:, mine])
        wide = part | {name: part[name].float() for name in ROWS}
        expected = differentiated(flashlatte.dense_prefill, wide, part_gradients, backend="reference")
        baseline = rounded(part, part_gradients, backend)
        lse = expected.pop("lse")
        compare.assert_close(results["lse"][:, mine], lse, compare.DENSE_PREFILL_LSE, "lse")
        compare.assert_close(results["out"][:, mine], expected["out"], compare.DENSE_PREFILL_OUT, "out")
        for name, wanted in expected.items():
            result = results[name][:, kv if name in ("dk", "dv") else mine]
            compare.assert_accurate(result, wanted, baseline[name], name)
            if noise is not None:
                error, accepted = ((x.float() - wanted).norm().item() for x in (result, baseline[name]))
                assert error <= noise * accepted, f"{name}: all errors together {error:.4g}, rounding's {accepted:.4g}"


def check(arguments: Arguments, backend: str, noise: float | None = None) -> None:
    gradients = gradients_for(arguments)
    assert_right(prefill(arguments, backend, gradients), arguments, gradients, backend, noise)
