"""The kernels that sparse MLA launches on GPUs without Hopper kernels, recorded without a GPU.

These are the kernels of FlashLatte's vLLM plugin for a model with an indexer, of FlashLatte's own layer, and of dense
MLA.
"""

from __future__ import annotations

from typing import Any

import torch
from support.compile import Launch
from support.recording import Recorded

from flashlatte.bench import problems, workloads
from flashlatte.runtime import machine, triton_kernel

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
# The same number of SMs for all: launches depend on it, kernels do not.
NUM_SMS = 132
# Sizes that are constants of kernels are those of DeepSeek-V3.2; others are small. By name, with the kernels of each.
CALLS: dict[str, Any] = {
    **{
        f"sparse_decode, {form}, {heads} heads": problems.SparseDecode(
            form, 2, 1, heads, 2048, tokens=2048, page_size=64
        )
        for form in ("v32", "bf16")
        for heads in (16, 128)
    },
    "sparse_decode, model1, 64 heads": problems.SparseDecode(
        "model1", 2, 1, 64, topk=128, tokens=1024, page_size=256, extra_topk=512, extra_tokens=1024
    ),
    **{f"sparse_prefill, {heads} heads": problems.SparsePrefill(576, heads, 2048, 2048, s_q=4) for heads in (16, 128)},
    "sparse_prefill, 64 heads of 512": problems.SparsePrefill(512, 64, 512, 1024, s_q=4),
    "index_query": problems.IndexQuery(4),
    "index_quantize": problems.IndexQuantize(64),
    "index_gather": problems.IndexGather(2, 64),
    "index_logits": problems.IndexLogits(16, 256, 64),
    "paged_index_logits": problems.PagedIndexLogits(2, 256),
    "topk": problems.TopK(4, 32768),
    "index_convert": problems.IndexConvert(2, 2048),
    "cache_write, v32": problems.CacheWrite("v32", 64),
    "cache_write, bf16": problems.CacheWrite("bf16", 64),
    "cache_gather, v32": problems.CacheGather("v32", 64),
    "cache_gather, bf16": problems.CacheGather("bf16", 64),
    "concat_mla_q": problems.ConcatMlaQ(4),
    "latent_rows": problems.LatentRows(4),
    "rotate_heads": problems.RotateHeads(4),
    "dense_decode, bf16, 16 heads": problems.DenseDecode(2, 1, 16, 256),
    "dense_decode, bf16, 128 heads": problems.DenseDecode(2, 1, 128, 256),
    "dense_decode, fp8, 16 heads": problems.DenseDecode(2, 1, 16, 256, cache_format="fp8"),
    "dense_prefill": problems.DensePrefill(192, 1, 2, 128, causal=True),
    "merge_states": problems.MergeStates(4, heads=16),
}


# Spill instructions in the innermost loop that multiplies matrices, with Triton 3.6 and 3.7; elsewhere there are none.
LOOP_SPILLS = {
    ("sparse_decode, v32, 128 heads", 80): 10,
    ("sparse_decode, v32, 128 heads", 90): 8,
    ("sparse_decode, bf16, 128 heads", 80): 1,
    ("sparse_decode, bf16, 16 heads", 100): 9,
    ("sparse_decode, bf16, 128 heads", 100): 3,
    ("sparse_decode, model1, 64 heads", 80): 9,
    ("sparse_decode, model1, 64 heads", 90): 98,
    ("sparse_decode, model1, 64 heads", 100): 2,
    ("dense_decode, bf16, 128 heads", 80): 2,
}
_BEGIN, _END = "<!-- compiled: begin -->\n", "<!-- compiled: end -->"


def launched(problem: Any, arch: int) -> list[Recorded]:
    """The launches of one call on a GPU of compute capability ``arch``, each kernel once."""
    found: dict[str, Recorded] = {}

    def collect(jitted: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        names = [parameter.name for parameter in jitted.params]
        constants = {name: options.pop(name) for name in list(options) if name in names}
        named = dict(zip(names, arguments, strict=False)) | constants
        one = Recorded(jitted, Launch((1,), named, options))
        found.setdefault(one.variant, one)

    workload = workloads.prepare(problem, torch.device("cpu"))
    with machine.assuming(machine.GPU(divmod(arch, 10), NUM_SMS)), triton_kernel.launching(collect):
        workload.run("portable")
    return list(found.values())


def table() -> str:
    """The table of ``docs/guide/gpus.md``: "yes" for a call whose kernels compile, fit, and spill nothing in a loop."""
    lines = ["| call | " + " | ".join(f"sm_{arch}" for arch in ARCHITECTURES) + " |"]
    lines.append("|---" * (1 + len(ARCHITECTURES)) + "|")
    for name in CALLS:
        spills = (LOOP_SPILLS.get((name, arch)) for arch in ARCHITECTURES)
        lines.append(f"| {name} | " + " | ".join("yes" if one is None else f"yes, {one}" for one in spills) + " |")
    return "\n".join(lines) + "\n"


def written_into(page: str) -> str:
    """``page`` with the table between its markers."""
    begin, end = page.index(_BEGIN) + len(_BEGIN), page.index(_END)
    return page[:begin] + table() + page[end:]
