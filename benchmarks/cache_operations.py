"""Time what moves cache bytes on a GPU, beside a copy within the GPU and one to pinned host memory.

    PYTHONPATH=. python benchmarks/cache_operations.py

Results are checked where they are timed. A rate counts the bytes read and written; one between GPU and host counts them
once, as the link does. Each line ends with the share of the copy that bounds it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton.testing

import flashlatte
from flashlatte import kv_cache

CUDA = torch.device("cuda")
TOKENS, HEADS, WIDTH, PAGE_SIZE = 65536, 8, 128, 64
PAGES = 4096


def milliseconds(call: Callable[[], object]) -> float:
    median: Any = triton.testing.do_bench(call, warmup=50, rep=200, return_mode="median")
    return median


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Report:
    """Prints a line for each case, against the copies measured at the start."""

    def __init__(self, pages: torch.Tensor, host: torch.Tensor) -> None:
        source = torch.empty(1 << 30, dtype=torch.uint8, device=CUDA)
        target = torch.empty_like(source)
        self.ceilings = {"copy": 2 * nbytes(source) / milliseconds(lambda: target.copy_(source)) / 1e6}
        outward = milliseconds(lambda: host.copy_(pages, non_blocking=True))
        inward = milliseconds(lambda: pages.copy_(host, non_blocking=True))
        self.ceilings |= {"copy out": nbytes(host) / outward / 1e6, "copy in": nbytes(host) / inward / 1e6}
        for name, rate in self.ceilings.items():
            print(f"{name:<52}{rate:>18.0f} GB/s")

    def line(self, name: str, moved: int, call: Callable[[], object], ceiling: str = "copy") -> None:
        time = milliseconds(call)
        rate = moved / time / 1e6
        print(f"{name:<52}{time * 1e3:>9.1f} us{rate:>7.0f} GB/s  {rate / self.ceilings[ceiling]:.2f} of {ceiling}")


def merges(report: Report) -> None:
    outs = [torch.randn(8192, 128, 128, device=CUDA).bfloat16() for _ in range(2)]
    lses = [torch.randn(128, 8192, device=CUDA) for _ in range(2)]
    out, out_lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    arguments = (outs[0], lses[0], outs[1], lses[1], out_lse)
    every = nbytes(*outs, *lses, out, out_lse)
    merge = flashlatte.merge_attn_states
    report.line("merge of 2, 8,192 x 128 x 128", every, lambda: merge(out, *arguments))
    half = every - nbytes(outs[0], lses[0]) // 2
    report.line("the same, half of it without context", half, lambda: merge(out, *arguments, 4096))
    narrow, scale = torch.empty_like(out, dtype=torch.float8_e4m3fn), torch.tensor(0.1, device=CUDA)
    report.line("the same, to e4m3", every - nbytes(narrow), lambda: merge(narrow, *arguments, None, scale))


def queries(report: Report) -> None:
    latent, rope = (torch.randn(128, 8192, width, device=CUDA).bfloat16().transpose(0, 1) for width in (512, 64))
    out = torch.empty(8192, 128, 576, dtype=torch.bfloat16, device=CUDA)
    call = partial(flashlatte.concat_mla_q, latent, rope, out=out)
    report.line("concat_mla_q, 8,192 x 128, heads first", 2 * nbytes(out), call)
    assert out.equal(torch.cat((latent, rope), dim=-1))


def writes(report: Report) -> None:
    key, value = (torch.randn(TOKENS, HEADS, WIDTH, device=CUDA).bfloat16() for _ in range(2))
    slots = torch.randperm(TOKENS, device=CUDA)
    shape = (TOKENS // PAGE_SIZE, PAGE_SIZE, HEADS, WIDTH)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        caches = [torch.zeros(shape, device=CUDA).to(dtype) for _ in range(2)]
        moved = nbytes(key, value, *caches)
        call = partial(flashlatte.reshape_and_cache, key, value, *caches, slots)
        report.line(f"reshape_and_cache, 65,536 tokens, {dtype}".replace("torch.", ""), moved, call)
        if dtype == torch.bfloat16:
            assert caches[0].flatten(0, 1)[slots].equal(key)
            continue
        scales = {name: torch.zeros(shape[:3], device=CUDA) for name in ("k_scale", "v_scale")}
        report.line("the same, a scale a token and head", moved + nbytes(*scales.values()), partial(call, **scales))
    pieces = torch.zeros(shape[0], HEADS, WIDTH // 8, PAGE_SIZE, 8, dtype=torch.bfloat16, device=CUDA)
    apart = torch.zeros(shape[0], HEADS, WIDTH, PAGE_SIZE, dtype=torch.bfloat16, device=CUDA)
    views = pieces.permute(0, 3, 1, 2, 4), apart.permute(0, 3, 1, 2)
    call = partial(flashlatte.reshape_and_cache, key, value, *views, slots)
    report.line("the same, bf16 in pieces and apart", nbytes(key, value, pieces, apart), call)


def pages_moved(report: Report, cache: torch.Tensor, host: torch.Tensor) -> None:
    order = torch.randperm(PAGES, device=CUDA)
    every = torch.arange(PAGES, device=CUDA)
    lists: dict[str, Any] = {"src_pages": order, "dst_pages": every}
    expected = cache[order].cpu()
    report.line(
        "swap out 4,096 v32 pages", nbytes(host), lambda: kv_cache.swap_blocks(cache, host, **lists), "copy out"
    )
    torch.cuda.synchronize()
    assert host.equal(expected)
    report.line("swap in", nbytes(host), lambda: kv_cache.swap_blocks(host, cache, **lists), "copy in")
    first, second = (torch.randperm(PAGES // 2).tolist() for _ in range(2))
    second = [page + PAGES // 2 for page in second]
    moved = nbytes(cache)
    report.line("copy 2,048 v32 pages, host lists", moved, lambda: kv_cache.copy_blocks(cache, first, second))
    on_device = [torch.tensor(one, device=CUDA) for one in (first, second)]
    report.line("the same, lists on the GPU (through scratch)", moved, lambda: kv_cache.copy_blocks(cache, *on_device))
    boundaries = torch.tensor([0, PAGES * PAGE_SIZE], dtype=torch.int32, device=CUDA)
    table, out = order.int().unsqueeze(0), torch.empty(PAGES * PAGE_SIZE, 656, dtype=torch.uint8, device=CUDA)
    call = partial(kv_cache.gather_records, cache, table, boundaries, out.shape[0], out=out)
    report.line("gather_records, v32, 262,144 tokens", 2 * nbytes(out), call)
    assert out.view(PAGES, -1).equal(cache[order].view(PAGES, -1))


def main() -> None:
    shape = (PAGES, PAGE_SIZE, 1, 656)
    size = math.prod(shape)
    cache = torch.randint(0, 256, (size,), dtype=torch.uint8, device=CUDA).view(shape)
    host = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
    report = Report(cache, host)
    merges(report)
    queries(report)
    writes(report)
    pages_moved(report, cache, host)
    small = cache[:64].clone()
    one = torch.zeros(1, dtype=torch.int64, device=CUDA)
    times = [milliseconds(lambda: kv_cache.copy_blocks(small, one, one + 1)) for _ in range(3)]
    print(f"{'copy of one page, lists on the GPU':<52}{statistics.median(times) * 1e3:>9.1f} us")


if __name__ == "__main__":
    main()
