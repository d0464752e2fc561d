"""Check the Hopper kernels of index_logits on a GPU, and time them beside an e4m3 matmul.

    PYTHONPATH=. python benchmarks/index_logits.py [--out DIRECTORY] [--section NAME]

Each section runs in a process of its own with a time limit, so that a kernel that hangs does not take the rest along.
A table comes last; the directory gets the whole output.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import subprocess
import sys
from pathlib import Path

import torch

CUDA = torch.device("cuda")
NAN_BYTE = 0x7F
SECTIONS = {"check_ragged": 200, "check_paged": 200, "time_ragged": 120, "time_paged": 60}


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA).to(torch.float8_e4m3fn)


def oracle(q, k, k_scale, weights):
    """All logits [M, N] in float64 (float32 where that takes too long), of the numbers that the kernel gets."""
    dtype = torch.float64 if q.shape[0] * k.shape[0] < 3_000_000 else torch.float32
    k = k.to(dtype)
    rows = []
    for index in range(q.shape[0]):
        scores = torch.relu(q[index].to(dtype) @ k.T)
        rows.append((weights[index].to(dtype) @ scores) * k_scale.to(dtype))
    return torch.stack(rows)


def compare(name, got, want, seen):
    """Every seen logit against the oracle; returns DeepGEMM's measure, 1 - 2 xy / (xx + yy)."""
    got, want = got.double()[seen], want.double()[seen]
    if not got.numel():
        return 0.0
    assert torch.isfinite(got).all(), f"{name}: {(~torch.isfinite(got)).sum()} of {got.numel()} are not finite"
    difference = 1 - 2 * (got * want).sum() / (got * got + want * want).sum()
    assert difference < 5e-6, f"{name}: difference {difference:.2e}"
    largest = (got - want).abs().max() / want.abs().max()
    assert largest < 5e-3, f"{name}: largest error {largest:.2e}"
    return float(difference)


def check_ragged() -> None:
    from flashlatte.ops.index_logits.hopper import ragged

    torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (1, 1, 64, 128),
        (7, 100, 64, 128),
        (9, 65, 32, 128),
        (130, 4097, 64, 128),
        (700, 3000, 64, 128),
        (3, 300_000, 64, 128),
        (33, 1000, 128, 128),
        (130, 2049, 16, 128),
        (64, 300, 8, 64),
        (64, 513, 64, 32),
    ]
    for m, n, heads, dim in shapes:
        for kind in ("full", "causal", "random"):
            q, k = values(m, heads, dim), values(n, dim)
            scale, weights = torch.rand(n, device=CUDA) + 0.5, torch.randn(m, heads, device=CUDA)
            start, end = torch.zeros(m, dtype=torch.int32), torch.full((m,), n, dtype=torch.int32)
            if kind == "causal":
                end = (n - m + 1 + torch.arange(m)).int()
            if kind == "random":
                start = torch.randint(-5, n + 5, (m,), generator=generator, dtype=torch.int32)
                end = torch.randint(-5, n + 9, (m,), generator=generator, dtype=torch.int32)
            start, end = start.to(CUDA), end.to(CUDA)
            key = torch.arange(n, device=CUDA)
            seen = (key >= start[:, None]) & (key < end[:, None])
            unseen = ~seen.any(0)
            k.view(torch.uint8)[unseen] = NAN_BYTE
            scale[unseen] = torch.nan
            want = oracle(q, k, scale, weights)
            name = f"ragged {m}x{n} H{heads} D{dim} {kind}"
            wide = torch.full((m, n + 24), 7.0, device=CUDA)
            logits = wide[:, :n]
            ragged(q, k, scale, weights, start, end, logits, False, False)
            difference = compare(name, logits, want, seen)
            assert (logits[~seen] == 7).all(), f"{name}: wrote where no query sees"
            assert (wide[:, n:] == 7).all(), f"{name}: wrote beside the rows"
            again = torch.full((m, n), torch.nan, device=CUDA)
            ragged(q, k, scale, weights, start, end, again, True, False)
            assert torch.equal(again[seen], logits[seen]), f"{name}: two runs differ"
            assert (again[~seen] == -torch.inf).all(), f"{name}: not cleaned"
            width = max(int((end.clamp(max=n) - start.clamp(min=0)).max()), 1)
            packed = torch.full((m, width), torch.nan, device=CUDA)
            ragged(q, k, scale, weights, start, end, packed, True, True)
            for row in range(0, m, max(m // 16, 1)):
                mine = logits[row][seen[row]]
                assert torch.equal(packed[row, : len(mine)], mine), f"{name}: compressed row {row}"
                assert (packed[row, len(mine) :] == -torch.inf).all(), f"{name}: compressed row {row} not cleaned"
            if width > 8:
                narrow = torch.full((m, width), 7.0, device=CUDA)
                ragged(q, k, scale, weights, start, end, narrow[:, : width // 2], False, True)
                assert (narrow[:, width // 2 :] == 7).all(), f"{name}: wrote beyond the width"
            if kind == "random":
                rounded = torch.full((m, n), torch.nan, device=CUDA, dtype=torch.bfloat16)
                ragged(q, k, scale, weights, start.long(), end.long(), rounded, True, False)
                assert torch.equal(rounded, again.bfloat16()), f"{name}: bf16, ranges of int64"
            print(f"ok {name} {difference:.1e}", flush=True)


def paged_problem(batch, next_n, heads, page_size, lengths, dim=128):
    columns = max(int(lengths.max()) + page_size - 1, page_size) // page_size + 1
    pages = batch * columns + 3
    q, weights = values(batch, next_n, heads, dim), torch.randn(batch * next_n, heads, device=CUDA)
    cache = torch.full((pages, page_size, 1, dim + 4), NAN_BYTE, dtype=torch.uint8, device=CUDA)
    table = torch.randperm(pages, device=CUDA)[: batch * columns].view(batch, columns).int()
    return q, cache, weights, table


def fill(cache, k, scale, pages, dim=128):
    """Write all keys [len, D] and scales of a request into its pages."""
    page_size = cache.shape[1]
    flat = cache.view(cache.shape[0], -1)
    for index, page in enumerate(pages):
        keys = slice(index * page_size, (index + 1) * page_size)
        count = len(k[keys])
        if count:
            flat[page, : count * dim] = k[keys].view(torch.uint8).flatten()
            begin = page_size * dim
            flat[page, begin : begin + 4 * count] = scale[keys].view(torch.uint8).flatten()


def check_paged() -> None:
    from flashlatte.ops.index_logits.hopper import paged

    torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator().manual_seed(0)
    rows = [
        (1, 1, 64, 64, 5000),
        (3, 1, 64, 64, 700),
        (5, 2, 64, 64, 900),
        (150, 1, 64, 64, 300),
        (300, 2, 32, 64, 100),
        (4, 3, 64, 128, 2000),
        (4, 5, 128, 64, 500),
        (4, 4, 16, 32, 500),
        (7, 1, 8, 256, 1000),
        (1000, 1, 64, 64, 70),
    ]
    for batch, next_n, heads, page_size, longest in rows:
        for per_query in (False, True):
            name = f"paged b{batch} next_n{next_n} H{heads} page{page_size} {'per query' if per_query else ''}"
            shape = (batch, next_n) if per_query else (batch,)
            lengths = torch.randint(0, longest, shape, generator=generator, dtype=torch.int32)
            lengths[0] = longest
            if batch > 2:
                lengths[1] = 0
            if batch > 4:
                lengths[3] = -4
            q, cache, weights, table = paged_problem(batch, next_n, heads, page_size, lengths)
            width = longest + 37
            want = torch.zeros(batch * next_n, width, dtype=torch.float64, device=CUDA)
            seen = torch.zeros(batch * next_n, width, dtype=torch.bool, device=CUDA)
            for request in range(batch):
                count = max(int(lengths[request].max()), 0)
                k, scale = values(count, 128), torch.rand(count, device=CUDA) + 0.5
                used = -(-count // page_size)
                fill(cache, k, scale, table[request, :used].tolist())
                table[request, used:] = torch.randint(-(2**31), 2**31 - 1, (1,), generator=generator).item()
                for token in range(next_n):
                    row = request * next_n + token
                    end = lengths[request, token] if per_query else lengths[request] - (next_n - 1 - token)
                    end = max(int(end), 0)
                    if count:
                        want[row, :count] = oracle(q[request, token : token + 1], k, scale, weights[row : row + 1])[0]
                    seen[row, :end] = True
            lost = torch.zeros_like(seen)
            if batch > 2:
                # A page in the middle of a request is not in the cache.
                table[2, 0] = (-1, len(cache), 2**31 - 1)[batch % 3]
                lost[2 * next_n : 3 * next_n, :page_size] = seen[2 * next_n : 3 * next_n, :page_size]
                seen &= ~lost
            lengths = lengths.to(CUDA)
            if per_query:
                lengths, table = lengths.long(), table.long()
            logits = torch.full((batch * next_n, width + 11), 7.0, device=CUDA)
            paged(q, cache, weights, lengths, table, logits[:, :width], False)
            difference = compare(name, logits[:, :width], want, seen)
            assert (logits[:, :width][lost] == 0).all(), f"{name}: a key of a lost page"
            assert (logits[:, :width][~seen & ~lost] == 7).all(), f"{name}: wrote where no query sees"
            assert (logits[:, width:] == 7).all(), f"{name}: wrote beside the rows"
            again = torch.full((batch * next_n, width), torch.nan, device=CUDA)
            paged(q, cache, weights, lengths, table, again, True)
            assert torch.equal(again[seen], logits[:, :width][seen]), f"{name}: two runs differ"
            assert (again[~seen] == -torch.inf).all(), f"{name}: not cleaned"
            narrow = torch.full((batch * next_n, longest // 2), 7.0, device=CUDA)
            paged(q, cache, weights, lengths, table, narrow[:, : longest // 2 - 3], False)
            assert (narrow[:, longest // 2 - 3 :] == 7).all(), f"{name}: wrote beyond the width"
            print(f"ok {name} {difference:.1e}", flush=True)


def microseconds(call) -> float:
    from triton import testing

    return testing.do_bench(call, return_mode="median") * 1e3


def fp8_matmul(size: int = 8192):
    a, b = values(size, size), values(size, size).T
    one = torch.ones((), device=CUDA)
    return functools.partial(torch._scaled_mm, a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def time_ragged() -> None:
    """In turns with the matmul, as whoever comes later finds the chip hotter."""
    from flashlatte.ops.index_logits.hopper import ragged

    matmul = fp8_matmul()
    # Rows, keys, heads, and DeepGEMM's time.
    for m, n, heads, deep_gemm in [
        (4096, 32768, 64, 1968),
        (2048, 8192, 64, 243),
        (4096, 32768, 32, 1149),
        (2048, 8192, 32, 134),
        (4096, 131072, 64, 8546),
    ]:
        q, k = values(m, heads, 128), values(n, 128)
        scale, weights = torch.rand(n, device=CUDA) + 0.5, torch.randn(m, heads, device=CUDA)
        start = torch.zeros(m, dtype=torch.int32, device=CUDA)
        end = (n - m + 1 + torch.arange(m, device=CUDA)).int()
        flops = 2 * heads * 128 * float(end.double().sum())
        logits = torch.empty(m, n, device=CUDA)
        arguments = (q, k, scale, weights, start, end, logits)
        calls = {
            "plain": functools.partial(ragged, *arguments, False, False),
            "clean": functools.partial(ragged, *arguments, True, False),
            "matmul": matmul,
        }
        times = {name: [] for name in calls}
        for _ in range(4):
            for name, call in calls.items():
                times[name].append(microseconds(call))
        us, cleaned, reference = (statistics.median(times[name]) for name in ("plain", "clean", "matmul"))
        tflops, ceiling = flops / us / 1e6, 2 * 8192**3 / reference / 1e6
        print(
            f"table ragged {m}x{n} H{heads}: {us:.0f} us, {tflops:.0f} TFLOPS, {tflops / ceiling:.3f} of matmul "
            f"({ceiling:.0f}); clean {cleaned:.0f} us; DeepGEMM {deep_gemm} us, {deep_gemm / us:.2f}x",
            flush=True,
        )


# Batch, keys, queries of a request, and DeepGEMM's time without its metadata call.
PAGED_CASES = [
    (64, 32768, 1, 112),
    (64, 32768, 2, 116),
    (128, 8192, 1, 63.1),
    (128, 8192, 2, 65.5),
    (4, 131072, 1, 38.3),
    (4, 131072, 2, 39.6),
    (1, 131072, 1, 14.6),
    (1, 131072, 2, 15.3),
    (1, 8192, 1, None),
]


def paged_arguments(batch: int, keys: int, next_n: int):
    columns = keys // 64
    q, weights = values(batch, next_n, 64, 128), torch.randn(batch * next_n, 64, device=CUDA)
    cache = torch.randint(0, 0x7E, (batch * columns, 64, 1, 132), dtype=torch.uint8, device=CUDA)
    table = torch.randperm(batch * columns, device=CUDA).view(batch, columns).int()
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=CUDA)
    return q, cache, weights, lengths, table, torch.empty(batch * next_n, keys, device=CUDA), False


def time_paged() -> None:
    from flashlatte.ops.index_logits.hopper import paged

    tiny = torch.zeros(1, device=CUDA)
    print(f"table an addition of one number: {microseconds(lambda: tiny.add_(1)):.1f} us", flush=True)
    for batch, keys, next_n, deep_gemm in PAGED_CASES:
        arguments = paged_arguments(batch, keys, next_n)
        us = microseconds(functools.partial(paged, *arguments))
        gbps = arguments[1].numel() / us / 1e3
        beside = f"; DeepGEMM {deep_gemm} us + metadata, {deep_gemm / us:.2f}x" if deep_gemm else ""
        print(f"table paged b{batch} {keys} next_n {next_n}: {us:.1f} us, cache {gbps:.0f} GB/s{beside}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", choices=SECTIONS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.section:
        globals()[options.section]()
        return
    table, log = [], []
    for section, seconds in SECTIONS.items():
        command = [sys.executable, "-u", __file__, "--section", section]
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False
            )
            text, status = done.stdout, f"exit {done.returncode}"
        except subprocess.TimeoutExpired as error:
            text, status = (error.stdout or b"").decode(), f"stopped after {seconds} s"
        log.append(f"== {section}\n{text}")
        lines = text.splitlines()
        checked = sum(line.startswith("ok ") for line in lines)
        table.append(f"{section}: {status}" + (f", {checked} checks passed" if checked else ""))
        table += [line.removeprefix("table ") for line in lines if line.startswith("table ")]
        if status != "exit 0":
            table += lines[-6:]
    if options.out:
        (options.out / "index_logits.log").write_text("\n".join(log))
    print("\n".join(table))


if __name__ == "__main__":
    main()
