"""Small shapes of every operation on every backend with kernels, for compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py [PART OF A NAME]
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitize.py --races [PART OF A NAME]

Indices, pages and lengths that lie outside of what there is are among the shapes. Results are compared as well: the
exit code is 1 if one is wrong.

``--races`` leaves out the kernels that racecheck cannot judge: it follows barriers of CTAs and of warps, but not the
mbarriers by which warpgroups hand over what TMA and tensor cores read and write, and reports such places as errors.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

# A separate allocation for every tensor, so that out-of-bounds reads are detected.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

import flashlatte
from flashlatte import kv_cache
from flashlatte.testing import compare
from flashlatte.testing.cases import DenseDecodeCase, DensePrefillCase, SparseDecodeCase, SparsePrefillCase
from flashlatte.testing.draws import Draw

DEVICE = "cuda"
BACKENDS = ("hopper", "portable")
# Operations whose Hopper kernel has only barriers that racecheck supports.
RACES_OF_HOPPER = ("topk",)
# Parts of names of cases that take racecheck more than a minute.
TOO_LONG_FOR_RACES = ("batch 80",)
EQUAL = compare.Tolerance(0.0, 0.0)
MERGED = {"out": compare.Tolerance(1e-3, 2.01 / 256, 1e-5), "lse": compare.Tolerance(2e-6, 2e-6)}

Run = Callable[[str], dict[str, torch.Tensor]]
Tolerances = dict[str, compare.Tolerance]


def dense_decode() -> Iterator[tuple[str, Run, Tolerances]]:
    for case in (
        DenseDecodeCase(batch=3, s_q=2, s_k=200, h_q=128, varlen=True, causal=True, zero_lengths=True),
        DenseDecodeCase(batch=2, s_q=1, s_k=700, h_q=16),
        DenseDecodeCase(batch=1, s_q=1, s_k=4000, h_q=64, dtype=torch.float16),
        DenseDecodeCase(batch=2, s_q=3, s_k=65, h_q=3, page_size=61, strided=True, index_dtype=torch.int64),
        DenseDecodeCase(batch=2, s_q=1, s_k=65, h_q=6, h_kv=3, head_dim=48, head_dim_v=32, page_size=1),
        DenseDecodeCase(batch=2, s_q=1, s_k=130, h_q=128, cache_dtype=torch.float8_e4m3fn),
        DenseDecodeCase(batch=2, s_q=1, s_k=130, h_q=128, page_size=16, strided=True),
        DenseDecodeCase(batch=80, s_q=2, s_k=90, h_q=64, page_size=48, varlen=True, cache_dtype=torch.float8_e4m3fn),
    ):
        arguments = case.inputs(DEVICE)
        arguments["block_table"][0, -1] = -7
        yield (
            brief(case),
            named(flashlatte.dense_decode, arguments),
            {"out": compare.DENSE_DECODE_OUT, "lse": compare.DECODE_LSE},
        )


def sparse_decode() -> Iterator[tuple[str, Run, Tolerances]]:
    for case in (
        SparseDecodeCase(batch=2, s_q=2, s_k=300, h_q=128, topk=128, zero_lengths=True),
        SparseDecodeCase(batch=2, s_q=1, s_k=90, h_q=16, topk=33, page_size=7, topk_lengths="token", strided=True),
        SparseDecodeCase(batch=2, s_q=2, s_k=90, h_q=64, topk=64, cache_format="model1", extra_topk=70, extra_s_k=80),
        SparseDecodeCase(batch=2, s_q=1, s_k=90, h_q=8, topk=65, cache_format="bf16", index_dtype=torch.int64),
        # Split into parts of one block, and of a pair.
        SparseDecodeCase(batch=2, s_q=1, s_k=90, h_q=64, topk=200, cache_format="model1"),
        SparseDecodeCase(batch=2, s_q=1, s_k=300, h_q=128, topk=1024),
    ):
        run = named(flashlatte.sparse_decode, case.inputs(DEVICE))
        yield brief(case), run, {"out": compare.SPARSE_DECODE_OUT, "lse": compare.DECODE_LSE}


def sparse_prefill() -> Iterator[tuple[str, Run, Tolerances]]:
    for case in (
        SparsePrefillCase(s_q=5, s_kv=200, h_q=128, topk=128, empty_rows=0.2),
        SparsePrefillCase(s_q=3, s_kv=200, h_q=64, topk=256, head_dim=512, topk_lengths=True),
        SparsePrefillCase(s_q=3, s_kv=50, h_q=3, topk=65, head_dim=48, d_v=32, strided=True),
    ):
        run = named(flashlatte.sparse_prefill, case.inputs(DEVICE), ("out", "max_logits", "lse"))
        statistics = dict.fromkeys(("max_logits", "lse"), compare.SPARSE_PREFILL_LSE)
        yield brief(case), run, {"out": compare.SPARSE_PREFILL_OUT, **statistics}


def sparse_attention() -> Iterator[tuple[str, Run, Tolerances]]:
    gradients = dict.fromkeys(("dq", "dkv", "d_sink"), compare.SPARSE_ATTENTION_GRADIENT)
    for case, deterministic in (
        (SparsePrefillCase(s_q=5, s_kv=200, h_q=128, topk=130, empty_rows=0.2), False),
        (SparsePrefillCase(s_q=3, s_kv=90, h_q=17, topk=70, head_dim=512, topk_lengths=True, duplicates=True), True),
        (SparsePrefillCase(s_q=3, s_kv=50, h_q=3, topk=65, head_dim=48, d_v=32, strided=True), True),
    ):
        arguments = case.inputs(DEVICE)
        leaves = [arguments[name].requires_grad_() for name in ("q", "kv", "attn_sink")]

        def run(
            backend: str,
            *,
            arguments: dict[str, Any] = arguments,
            leaves: list[torch.Tensor] = leaves,
            deterministic: bool = deterministic,
        ) -> dict[str, torch.Tensor]:
            out, lse = flashlatte.sparse_attention(**arguments, deterministic=deterministic, backend=backend)
            of_leaves = torch.autograd.grad(out, leaves, torch.full_like(out, 0.1))
            return dict(zip(("out", "lse", "dq", "dkv", "d_sink"), (out, lse, *of_leaves), strict=True))

        yield brief(case), run, {"out": compare.SPARSE_PREFILL_OUT, "lse": compare.SPARSE_PREFILL_LSE, **gradients}


def indexer_loss() -> Iterator[tuple[str, Run, Tolerances]]:
    names = ("d_index_q", "d_index_k", "d_index_weights")
    few_heads = SparsePrefillCase(s_q=3, s_kv=90, h_q=17, topk=70, head_dim=512, topk_lengths=True, duplicates=True)
    for case, dense, deterministic in (
        (SparsePrefillCase(s_q=5, s_kv=200, h_q=128, topk=130, empty_rows=0.2), False, False),
        (few_heads, False, False),
        (few_heads, False, True),
        (SparsePrefillCase(s_q=150, s_kv=150, h_q=3, topk=65, head_dim=48, d_v=32, strided=True), True, True),
    ):
        given, draw = case.inputs(DEVICE), Draw(1, DEVICE)
        shapes = ((case.s_q, 20, 128), (case.s_kv, 128), (case.s_q, 20))
        leaves = [draw.normal(*shape, dtype=torch.bfloat16, factor=1.0).requires_grad_() for shape in shapes]
        seen: dict[str, Any] = {"indices": given["indices"], "topk_length": given["topk_length"]}
        if dense:
            given["kv"].nan_to_num_(nan=0.1)
            start = draw.integers(-3, case.s_kv + 3, case.s_q)
            seen = {"key_start": start, "key_end": start + 40}

        def run(
            backend: str,
            *,
            arguments: tuple[torch.Tensor, ...] = (*leaves, given["q"], given["kv"]),
            leaves: list[torch.Tensor] = leaves,
            seen: dict[str, Any] = seen,
            deterministic: bool = deterministic,
        ) -> dict[str, torch.Tensor]:
            loss, _ = flashlatte.indexer_loss(*arguments, **seen, deterministic=deterministic, backend=backend)
            return {"loss": loss, **dict(zip(names, torch.autograd.grad(loss, leaves), strict=True))}

        tolerances = {"loss": compare.INDEXER_LOSS, **dict.fromkeys(names, compare.INDEXER_LOSS_GRADIENT)}
        options = f"{', dense' * dense}{', deterministic' * deterministic}"
        yield f"{brief(case)}{options}", run, tolerances


def dense_prefill() -> Iterator[tuple[str, Run, Tolerances]]:
    gradients = dict.fromkeys(("dq", "dk", "dv"), compare.DENSE_PREFILL_GRADIENT)
    for case in (
        DensePrefillCase(3, 150, 200, 4, 2, causal=True, varlen=True, zero_lengths=True),
        DensePrefillCase(2, 130, 70, 2, 2, head_dim=128, window=(20, 9), strided=True, index_dtype=torch.int64),
        DensePrefillCase(2, 40, 70, 3, 1, head_dim=37, d_v=20, causal=True, varlen=True, dtype=torch.float16),
    ):
        arguments = case.inputs(DEVICE)
        # A last request beyond the tensors.
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            arguments[name] = torch.cat((arguments[name], arguments[name].new_tensor([2**31 - 1])))
        rows = {name: arguments[name].requires_grad_() for name in ("q", "k", "v")}

        def run(
            backend: str, *, arguments: dict[str, Any] = arguments, rows: dict[str, torch.Tensor] = rows
        ) -> dict[str, torch.Tensor]:
            out, lse = flashlatte.dense_prefill(**arguments, backend=backend)
            of_rows = torch.autograd.grad(out, list(rows.values()), torch.ones_like(out))
            return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *of_rows), strict=True))

        yield brief(case), run, {"out": compare.DENSE_PREFILL_OUT, "lse": compare.DENSE_PREFILL_LSE, **gradients}


def merge_states() -> Iterator[tuple[str, Run, Tolerances]]:
    for parts, width in ((2, 512), (11, 33)):
        draw = Draw(0, DEVICE)
        outs = draw.normal(parts, 5, 7, width, dtype=torch.bfloat16)
        lses = draw.normal(parts, 5, 7, dtype=torch.float32)
        yield f"{parts} parts of {width}", named(flashlatte.merge_states, {"outs": outs, "lses": lses}), MERGED


def topk() -> Iterator[tuple[str, Run, Tolerances]]:
    for rows, width, k in ((2, 5000, 2048), (12, 9000, 600), (70, 700, 64)):
        logits = Draw(0, DEVICE).normal(rows, width, dtype=torch.float32)
        end = torch.full((rows,), width - 3, dtype=torch.int32, device=DEVICE)
        end[0], end[-1] = 2**31 - 1, 40 - width
        # Too short for the row, and with entries that are no pages.
        table = torch.arange(-3, rows * (width // 70) - 3, dtype=torch.int32, device=DEVICE).view(rows, -1)
        for pages in ({}, {"block_table": table, "page_size": 64}):

            def run(
                backend: str,
                *,
                logits: torch.Tensor = logits,
                end: torch.Tensor = end,
                k: int = k,
                pages: dict[str, Any] = pages,
            ) -> dict[str, torch.Tensor]:
                return {"indices": flashlatte.topk(logits, k, end=end, **pages, backend=backend)}

            yield f"{k} of {rows} x {width}{', slots' if pages else ''}", run, {"indices": EQUAL}


def write_and_gather() -> Iterator[tuple[str, Run, Tolerances]]:
    for cache_format in ("v32", "model1", "fp8", "bf16"):
        for page_size in (61, 64):
            draw, layout = Draw(0, DEVICE), kv_cache.get_format(cache_format)
            slots = torch.tensor([3, -1, 2 * page_size - 1, 0, 2 * page_size, -(2**31), 2**31 - 1], device=DEVICE)
            rows = draw.normal(slots.numel(), layout.head_dim, dtype=torch.bfloat16)
            table = torch.tensor([[1, 0], [-3, 2**31 - 1]], dtype=torch.int32, device=DEVICE)
            lengths = torch.tensor([0, page_size + 3, 2 * page_size + 40], dtype=torch.int32, device=DEVICE)

            def run(
                backend: str,
                *,
                page_size: int = page_size,
                layout: kv_cache.CacheFormat = layout,
                slots: torch.Tensor = slots,
                rows: torch.Tensor = rows,
                table: torch.Tensor = table,
                lengths: torch.Tensor = lengths,
            ) -> dict[str, torch.Tensor]:
                cache = kv_cache.allocate(layout, 2, page_size, device=DEVICE)
                kv_cache.write(cache, slots, rows, cache_format=layout, backend=backend)
                total = int(lengths[-1])
                gathered = kv_cache.gather(
                    cache, table, lengths, cache_format=layout, total_tokens=total, backend=backend
                )
                return {"rows": gathered}

            yield f"{cache_format}, page {page_size}", run, {"rows": EQUAL}


def named(operation: Callable[..., Any], arguments: dict[str, Any], results: tuple[str, ...] = ("out", "lse")) -> Run:
    return lambda backend: dict(zip(results, operation(**arguments, backend=backend), strict=True))


def brief(case: Any) -> str:
    """A case's fields that differ from the default."""
    fields = [field.name for field in dataclasses.fields(case) if getattr(case, field.name) != field.default]
    return ", ".join(f"{name} {getattr(case, name)}" for name in fields)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="?", default="", help="part of an operation's name")
    parser.add_argument("--races", action="store_true", help="only kernels that racecheck can judge")
    arguments = parser.parse_args()
    operations = (
        *(dense_decode, sparse_decode, sparse_prefill, sparse_attention, indexer_loss, dense_prefill),
        *(merge_states, topk, write_and_gather),
    )
    wrong = 0
    for operation in operations:
        if arguments.wanted not in operation.__name__:
            continue
        for name, run, tolerances in operation():
            if arguments.races and any(part in name for part in TOO_LONG_FOR_RACES):
                continue
            expected = run("reference")
            for backend in BACKENDS:
                if arguments.races and backend == "hopper" and operation.__name__ not in RACES_OF_HOPPER:
                    continue
                outcome = judge(run, backend, expected, tolerances)
                wrong += outcome.startswith("WRONG")
                print(f"{operation.__name__} {backend} {name}: {outcome}", flush=True)
    return int(wrong > 0)


def judge(run: Run, backend: str, expected: dict[str, torch.Tensor], tolerances: Tolerances) -> str:
    try:
        results = run(backend)
        torch.cuda.synchronize()
        for name, tolerance in tolerances.items():
            compare.assert_close(results[name], expected[name], tolerance, name)
    except ValueError as error:
        if "cannot serve this call" in str(error):
            return f"skipped, {error}"
        raise
    except AssertionError as error:
        return f"WRONG, {error}"
    return "right"


if __name__ == "__main__":
    sys.exit(main())
