"""Variants of the paged and the ragged kernel, timed on a GPU in one run of about a minute.

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

import ragged_items
import torch
from index_logits import (
    CUDA,
    PAGED_CASES,
    compare,
    fill,
    fp8_matmul,
    oracle,
    paged_arguments,
    paged_problem,
    values,
)
from triton import testing

from flashlatte.ops.index_logits.hopper import launch

FOLDER = Path("/tmp/index_logits_variants")
EDITS = {
    "base": {},
    "untouched": {
        "    touch_descriptors(cache, shared, BOX)\n": "",
        "    mbarrier.wait(shared.touched, 0)\n": "",
    },
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


def warm(job: str) -> None:
    """Compile what the run needs, to be found in Triton's cache."""
    kind, _, number = job.rpartition(" ")
    if kind in ("ragged", "items"):
        ragged_arguments(64, 128, int(number))(kind == "ragged", 1024 if kind == "items" else None)
    else:
        launch.paged_kernel = variant(kind)
        launch.paged(*paged_arguments(1, 128, int(number)))
        launch.paged(*paged_arguments(1, 128, int(number))[:-1], True)
    torch.cuda.synchronize()


def ragged_arguments(m: int, n: int, heads: int):
    q, k = values(m, heads, 128), values(n, 128)
    scale, weights = torch.rand(n, device=CUDA) + 0.5, torch.randn(m, heads, device=CUDA)
    start = torch.zeros(m, dtype=torch.int32, device=CUDA)
    end = (n - m + 1 + torch.arange(m, device=CUDA)).int()
    logits = torch.empty(m, n, device=CUDA)

    def call(clean: bool = False, item_keys: int | None = None) -> None:
        if item_keys is None:
            launch.ragged(q, k, scale, weights, start, end, logits, clean, False)
            return
        items = -(-m // (512 // heads)) * -(-n // item_keys)
        programs = min(items, launch.num_sms(CUDA))
        ragged_items.kernel[(programs,)](
            launch._vectors("q", q.reshape(-1, 128), 256),
            launch._numbers("weights", weights.reshape(-1), 256),
            launch._vectors("k", k, 64),
            launch._numbers("k_scale", scale, 64),
            start,
            1,
            end,
            1,
            m,
            n,
            item_keys,
            -(-items // programs),
            logits,
            n,
            n,
            0,
            HEADS=heads,
            HEAD_DIM=128,
            num_warps=4,
            enable_fp_fusion=True,
        )

    call.want = (q, k, scale, weights)
    call.seen = torch.arange(n, device=CUDA) < end[:, None]
    call.logits = logits
    call.flops = 2 * heads * 128 * float(end.double().sum())
    return call


def quickly(call) -> float:
    return testing.do_bench(call, warmup=10, rep=40, return_mode="median") * 1e3


def check_ragged(heads: int, m: int, n: int) -> None:
    call = ragged_arguments(m, n, heads)
    call.logits.fill_(torch.nan)
    call(True)
    compare(f"ragged {m}x{n} H{heads}", call.logits, oracle(*call.want), call.seen)
    assert (call.logits[~call.seen] == -torch.inf).all(), f"ragged {m}x{n} H{heads}: not cleaned"
    first = call.logits.clone()
    call(True)
    assert torch.equal(first, call.logits), f"ragged {m}x{n} H{heads}: two runs differ"


def check_paged(name: str, batch: int, next_n: int, longest: int) -> None:
    launch.paged_kernel = variant(name)
    lengths = torch.randint(0, longest, (batch,), dtype=torch.int32)
    lengths[0] = longest
    q, cache, weights, table = paged_problem(batch, next_n, 64, 64, lengths)
    logits = torch.full((batch * next_n, longest), torch.nan, device=CUDA)
    keys = []
    for request in range(batch):
        count = int(lengths[request])
        k, scale = values(count, 128), torch.rand(count, device=CUDA) + 0.5
        fill(cache, k, scale, table[request, : -(-count // 64)].tolist())
        keys.append((count, k, scale))
    launch.paged(q, cache, weights, lengths.to(CUDA), table, logits, True)
    for request in range(0, batch, max(batch // 20, 1)):
        count, k, scale = keys[request]
        for token in range(next_n):
            row, end = request * next_n + token, max(count - (next_n - 1 - token), 0)
            if end:
                want = oracle(q[request, token : token + 1], k, scale, weights[row : row + 1])[:, :end]
                compare(f"{name} b{batch} row {row}", logits[row : row + 1, :end], want, want == want)
            assert (logits[row, end:] == -torch.inf).all(), f"{name} b{batch} row {row}: not cleaned"


def check(variants: list[str], heads: list[int]) -> None:
    """Whatever is wrong is said, and timed all the same: there may be no other run."""
    shapes = [(64, 150, 3000), (64, 2048, 2048), (64, 3, 300_000), (32, 1500, 1600), (32, 7, 20000)]
    checks = [functools.partial(check_ragged, *shape) for shape in shapes if shape[0] in heads]
    for name in variants:
        for problem in ((1, 1, 20000), (5, 2, 900), (300, 1, 500), (3, 1, 5000)):
            checks.append(functools.partial(check_paged, name, *problem))
    passed = 0
    for one in checks:
        try:
            one()
            passed += 1
        except AssertionError as error:
            print(f"WRONG {one.args}: {error}", flush=True)
    print(f"{passed} of {len(checks)} checks passed", flush=True)


def compiled() -> set[str]:
    """Compile all at once; the jobs that went well."""
    names = [f"{name} {next_n}" for name in EDITS for next_n in (1, 2)]
    names += [f"{kind} {heads}" for kind in ("ragged", "items") for heads in (64, 32)]
    jobs = {name: subprocess.Popen([sys.executable, __file__, name], stderr=subprocess.PIPE) for name in names}
    done = set()
    for name, job in jobs.items():
        _, error = job.communicate(timeout=60)
        if job.returncode:
            print(f"left out: {name}: {error.decode().strip().splitlines()[-1:]}", flush=True)
        else:
            done.add(name)
    return done


def main() -> None:
    if len(sys.argv) > 1:
        warm(sys.argv[1])
        return
    for name in EDITS:
        variant(name)
    done = compiled()
    variants = [name for name in EDITS if {f"{name} 1", f"{name} 2"} <= done]
    check(variants, [heads for heads in (64, 32) if f"ragged {heads}" in done])
    tiny = torch.zeros(1, device=CUDA)
    print(f"an addition of one number: {quickly(lambda: tiny.add_(1)):.1f} us")
    for batch, keys, next_n, deep_gemm in PAGED_CASES:
        arguments = paged_arguments(batch, keys, next_n)
        times = {name: [] for name in variants}
        for _ in range(2):
            for name in variants:
                launch.paged_kernel = variant(name)
                times[name].append(quickly(functools.partial(launch.paged, *arguments)))
        row = ", ".join(f"{name} {min(us):.1f}" for name, us in times.items())
        print(f"paged b{batch} {keys} next_n {next_n}: {row} (DeepGEMM {deep_gemm})", flush=True)
    launch.paged_kernel = BASE
    matmul = fp8_matmul()
    for m, n, heads, deep_gemm, sizes in [
        (2048, 2048, 64, None, (None, 1024)),
        (2048, 8192, 64, 243, (None, 2048)),
        (2048, 8192, 32, 134, (None, 3648)),
        (4096, 32768, 64, 1968, (None, 4096)),
        (4096, 32768, 32, 1149, (None, 4096)),
    ]:
        call = ragged_arguments(m, n, heads)
        calls = {f"items of {size}" if size else "even": functools.partial(call, False, size) for size in sizes}
        if f"items {heads}" not in done:
            calls.pop(f"items of {sizes[1]}")
        calls |= {"clean": functools.partial(call, True), "matmul": matmul}
        times = {name: [] for name in calls}
        for _ in range(4):
            for name, one in calls.items():
                times[name].append(quickly(one))
        us = {name: statistics.median(each) for name, each in times.items()}
        ceiling = 2 * 8192**3 / us.pop("matmul") / 1e6
        row = ", ".join(f"{name} {each:.0f} ({call.flops / each / 1e6 / ceiling:.3f})" for name, each in us.items())
        print(f"ragged {m}x{n} H{heads}: {row} of matmul {ceiling:.0f} TFLOPS (DeepGEMM {deep_gemm} us)", flush=True)


if __name__ == "__main__":
    main()
