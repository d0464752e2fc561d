"""Variants of the paged kernel and of the ragged kernel's items, timed on a GPU in one run of about a minute.

PYTHONPATH=.:benchmarks python benchmarks/index_logits_variants.py
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from index_logits import (
    CUDA,
    PAGED_CASES,
    compare,
    fill,
    fp8_matmul,
    microseconds,
    oracle,
    paged_arguments,
    paged_problem,
    values,
)

from flashlatte.ops.index_logits.hopper import launch

FOLDER = Path("/tmp/index_logits_variants")
EDITS = {
    "base": {},
    "untouched": {
        "    touch_descriptors(cache, shared, BOX)\n": "",
        "    mbarrier.wait(shared.touched, 0)\n": "",
    },
    "24 slots": {"SLOTS = gl.constexpr(16)": "SLOTS = gl.constexpr(24)"},
    "8 slots": {"SLOTS = gl.constexpr(16)": "SLOTS = gl.constexpr(8)"},
}
BASE = launch.paged_kernel


@functools.cache
def variant(name: str):
    if not EDITS[name]:
        return BASE
    text = inspect.getsource(BASE)
    for old, new in EDITS[name].items():
        assert old in text, f"{name}: {old!r} is not there"
        text = text.replace(old, new)
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"paged_{name.replace(' ', '_')}.py"
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def warm(name: str) -> None:
    """Compile what the run needs, to be found in Triton's cache."""
    if name.startswith("ragged"):
        heads = int(name.removeprefix("ragged"))
        ragged_arguments(64, 128, heads)(True)
        return
    launch.paged_kernel = variant(name)
    for next_n in (1, 2):
        launch.paged(*paged_arguments(1, 128, next_n))
    torch.cuda.synchronize()


def ragged_arguments(m: int, n: int, heads: int):
    q, k = values(m, heads, 128), values(n, 128)
    scale, weights = torch.rand(n, device=CUDA) + 0.5, torch.randn(m, heads, device=CUDA)
    start = torch.zeros(m, dtype=torch.int32, device=CUDA)
    end = (n - m + 1 + torch.arange(m, device=CUDA)).int()
    logits = torch.empty(m, n, device=CUDA)

    def call(clean: bool = False, item_keys: int | None = None) -> None:
        launch.ragged(q, k, scale, weights, start, end, logits, clean, False, item_keys)

    call.want = (q, k, scale, weights)
    call.seen = torch.arange(n, device=CUDA) < end[:, None]
    call.logits = logits
    call.flops = 2 * heads * 128 * float(end.double().sum())
    return call


def check() -> None:
    for heads in (64, 32):
        call = ragged_arguments(150, 3000, heads)
        call.logits.fill_(torch.nan)
        call(True)
        difference = compare(f"ragged H{heads}", call.logits, oracle(*call.want), call.seen)
        assert (call.logits[~call.seen] == -torch.inf).all()
        print(f"ok ragged H{heads} {difference:.1e}")
    for name in EDITS:
        launch.paged_kernel = variant(name)
        for batch, next_n, longest in ((1, 1, 20000), (5, 2, 900), (300, 1, 500), (3, 1, 5000)):
            lengths = torch.randint(0, longest, (batch,), dtype=torch.int32)
            lengths[0] = longest
            q, cache, weights, table = paged_problem(batch, next_n, 64, 64, lengths)
            logits = torch.full((batch * next_n, longest), torch.nan, device=CUDA)
            launch_all = []
            for request in range(batch):
                count = int(lengths[request])
                k, scale = values(count, 128), torch.rand(count, device=CUDA) + 0.5
                fill(cache, k, scale, table[request, : -(-count // 64)].tolist())
                launch_all.append((count, k, scale))
            launch.paged(q, cache, weights, lengths.to(CUDA), table, logits, True)
            for request in range(0, batch, max(batch // 20, 1)):
                count, k, scale = launch_all[request]
                for token in range(next_n):
                    row, end = request * next_n + token, max(count - (next_n - 1 - token), 0)
                    if end:
                        want = oracle(q[request, token : token + 1], k, scale, weights[row : row + 1])[:, :end]
                        compare(f"{name} b{batch} row {row}", logits[row : row + 1, :end], want, want == want)
                    assert (logits[row, end:] == -torch.inf).all(), f"{name} b{batch} row {row}"
        print(f"ok paged {name}")


def main() -> None:
    if len(sys.argv) > 1:
        warm(sys.argv[1])
        return
    for name in EDITS:
        variant(name)
    jobs = [subprocess.Popen([sys.executable, __file__, name]) for name in (*EDITS, "ragged64", "ragged32")]
    assert not any(job.wait() for job in jobs)
    check()
    tiny = torch.zeros(1, device=CUDA)
    print(f"an addition of one number: {microseconds(lambda: tiny.add_(1)):.1f} us")
    for batch, keys, next_n, deep_gemm in [case for case in PAGED_CASES if case[2] == 1 or case[0] < 64]:
        arguments = paged_arguments(batch, keys, next_n)
        times = {name: [] for name in EDITS}
        for _ in range(2):
            for name in EDITS:
                launch.paged_kernel = variant(name)
                times[name].append(microseconds(functools.partial(launch.paged, *arguments)))
        row = ", ".join(f"{name} {min(us):.1f}" for name, us in times.items())
        print(f"paged b{batch} {keys} next_n {next_n}: {row} (DeepGEMM {deep_gemm})", flush=True)
    matmul = fp8_matmul()
    for m, n, heads, deep_gemm, sizes in [
        (2048, 8192, 64, 243, (None, 512, 2048, 4096)),
        (2048, 8192, 32, 134, (None, 512, 2048, 4096)),
        (4096, 32768, 64, 1968, (None, 1536, 8192)),
        (4096, 32768, 32, 1149, (None, 8192)),
    ]:
        call = ragged_arguments(m, n, heads)
        calls = {str(size or "auto"): functools.partial(call, False, size) for size in sizes}
        calls |= {"clean": functools.partial(call, True), "matmul": matmul}
        times = {name: [] for name in calls}
        for _ in range(3):
            for name, one in calls.items():
                times[name].append(microseconds(one))
        us = {name: statistics.median(each) for name, each in times.items()}
        ceiling = 2 * 8192**3 / us.pop("matmul") / 1e6
        row = ", ".join(f"{name} {each:.0f} ({call.flops / each / 1e6 / ceiling:.3f})" for name, each in us.items())
        print(f"ragged {m}x{n} H{heads}: {row} of matmul {ceiling:.0f} TFLOPS (DeepGEMM {deep_gemm} us)", flush=True)


if __name__ == "__main__":
    main()
