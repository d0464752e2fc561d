"""Every kernel of sparse MLA compiled for GPUs without Hopper kernels: it fits their shared memory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import triton
import triton.language as tl
from support.compile import SHARED_BYTES, compile_triton, loop_spills, spills_in_loops
from support.later_spills import allowed
from support.sparse_path import ARCHITECTURES, CALLS, LOOP_SPILLS, launched, written_into

from flashlatte.bench.environment import gpu_slug
from flashlatte.integrations.vllm.compat import E4M3_CAPABILITY
from flashlatte.runtime import machine

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "gpus.md"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
REGISTERS = 65_536
# The least shared memory and no conversion of e4m3; and the newest of these architectures. Others: ``make test-full``.
QUICK = {
    86: ("sparse_decode, v32, 16 heads", "sparse_prefill, 16 heads", "index_quantize"),
    120: ("paged_index_logits", "cache_write, v32"),
}


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(name, arch, id=f"{arch}, {name}", marks=() if name in QUICK.get(arch, ()) else pytest.mark.full)
        for arch in ARCHITECTURES
        for name in CALLS
    ],
)
def test_kernels_fit(name: str, arch: int) -> None:
    found = launched(CALLS[name], arch)
    assert found
    multiplies = False
    for one in found:
        code = one.compile(arch)
        assert code.shared <= SHARED_BYTES[arch], code
        threads = 32 * one.launch.options.get("num_warps", 4)
        assert code.registers * threads <= REGISTERS, code
        # Products of e4m3 are instructions of their own, and those of sm_100 too.
        has_products = re.search(r"\b(?:UTC)?[HQ]G?MMA\b", code.sass) is not None
        multiplies |= has_products
        spills = (loop_spills if has_products else spills_in_loops)(code.sass)
        assert spills <= allowed(f"sparse path {arch}, {name}", LOOP_SPILLS.get((name, arch), 0)), code
    products = ("sparse_decode", "sparse_prefill", "index_logits", "paged_index_logits", "dense_")
    assert multiplies == name.startswith(products)


@triton.jit
def to_e4m3(x, out):
    at = tl.arange(0, 1024)
    tl.store(out + at, tl.load(x + at).to(tl.float8e4nv))


def test_triton_refuses_conversions_to_e4m3_where_the_vllm_plugin_replaces_them() -> None:
    types = {"x": "*fp32", "out": "*fp8e4nv"}
    for arch in (80, 86):
        assert divmod(arch, 10) < E4M3_CAPABILITY
        with pytest.raises(triton.CompilationError, match="fp8e4nv not supported in this architecture"):
            compile_triton(to_e4m3, types, {}, arch)
    compile_triton(to_e4m3, types, {}, 10 * E4M3_CAPABILITY[0] + E4M3_CAPABILITY[1])


def test_the_page_has_the_table_of_compiled_kernels() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written_into(page) == page, "write support.sparse_path.table() between the markers of docs/guide/gpus.md"


def test_the_page_names_the_gpus_that_have_results() -> None:
    lines = (json.loads(line) for path in RESULTS.glob("*.jsonl") for line in path.read_text().splitlines())
    gpus = {gpu_slug(line["device"]) for line in lines if line.get("device", "cpu") != "cpu"}
    (row,) = re.findall(r"^\| ([^|]+) \| tested against", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {gpu_slug(name) for name in row.split(", ")} == gpus
