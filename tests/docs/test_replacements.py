"""The guide's tables of replaced functions, and of calls supported by the Hopper kernels, match the code."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import flashlatte
from flashlatte import kv_cache, ops
from flashlatte.runtime import dispatch

GUIDE = Path(__file__).parents[2] / "docs" / "guide"
MODULES = (
    "flashlatte.flash_mla",
    "flashlatte.flashinfer",
    "flashlatte.deep_gemm",
    "flashlatte.integrations.vllm.ops",
)
# Public functions whose operation has another name in dispatch.
OPERATIONS = {
    "copy_blocks": "cache_copy",
    "swap_blocks": "cache_copy",
    "gather": "cache_gather",
    "rope_write": "rope_cache_write",
    "write": "cache_write",
    "vit_attention": "dense_prefill",
    "index_query_mxfp4": "index_query",
    "its backward pass": "dense_prefill_backward",
    "sparse_attention": "sparse_attention_backward",
}
NO_KERNEL = "–"

MLA, V4 = {"head_dim": 576, "head_dim_v": 512}, {"head_dim": 512, "head_dim_v": 512}
PREFILL, PLAIN = {"head_dim": 192, "head_dim_v": 128}, {"head_dim": 128, "head_dim_v": 128}
BOTH, REPLACEMENTS, BACKENDS = ("replacements", "backends"), ("replacements",), ("backends",)
BACKWARD = "dense_prefill_backward"
# Page, operation, words in the last cell of its lines, and calls that the Hopper kernel does and does not support.
LIMITS = [
    (BOTH, "dense_decode", "pages of 8·n", [{"page_size": 24}], [{"page_size": 4}]),
    (BOTH, "dense_decode", "576 and 512", [MLA, V4], [PREFILL]),
    (BOTH, "sparse_decode", "576 and 512", [MLA, V4], [PREFILL]),
    (BOTH, "sparse_decode", "bf16", [{}], [{"dtype": torch.float16}]),
    (
        REPLACEMENTS,
        "sparse_decode",
        "not fp16, not 288 beside 528",
        [{"cache_format": name} for name in ("bf16", "v32", "v32_no_rope", "model1", "v41", "v41_fp4")],
        [{"cache_format": "fp16"}, {"cache_format": "v41", "extra_cache_format": "v41_fp4"}],
    ),
    (BOTH, "sparse_prefill", "576 and 512", [MLA, V4], [PREFILL]),
    (BOTH, "dense_prefill", "head dims of 8·n, 64 to 256", [{"head_dim": 72}], [{"head_dim": 68}, {"head_dim": 264}]),
    (BOTH, BACKWARD, "192/128 and 128/128", [PREFILL, PLAIN], [MLA]),
    (BOTH, "paged_attention", "pages of 16·n", [{"page_size": 48}], [{"page_size": 8}]),
    (BOTH, "paged_attention", "head dims to 192 and 128", [PREFILL], [{"head_dim": 192, "head_dim_v": 192}]),
    (BOTH, "paged_index_logits", "pages of 32·n", [{"page_size": 96}], [{"page_size": 16}]),
    (REPLACEMENTS, "index_logits", "8, 16, 32, 64 or 128 heads", [{"h_q": 8}, {"h_q": 128}], [{"h_q": 4}, {"h_q": 24}]),
    (BOTH, "topk", "k to 2,048", [{"k": 2048}], [{"k": 2049}]),
    (
        BACKENDS,
        "topk",
        "9 to 32 rows: 262,144 columns",
        [{"rows": 9, "columns": 2**18}],
        [{"rows": 9, "columns": 2**19}],
    ),
]


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """Dispatch as on an H100."""
    ops.load()
    monkeypatch.setattr("flashlatte.runtime.machine.compute_capability", lambda _: (9, 0))


def refusal(operation: str, **facts: Any) -> str | None:
    """Why the Hopper kernel does not support a call."""
    dtype = torch.float8_e4m3fn if "index_logits" in operation else torch.bfloat16
    call = dispatch.CallSpec(operation, torch.device("cuda", 0), **{"dtype": dtype, **facts})
    return next(choice.refusal for choice in dispatch.explain(call) if choice.backend == "hopper")


def has_kernel(operation: str) -> bool:
    return not (refusal(operation) or "").startswith("has no ")


def table(text: str) -> list[list[str]]:
    """The cells of the first table, without its heading."""
    lines = text[text.index("\n| ") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def replacements(module: str) -> list[list[str]]:
    return table((GUIDE / "replacements.md").read_text().split(f": `{module}`\n")[1])


def backends() -> list[list[str]]:
    return table((GUIDE / "backends.md").read_text().split("shapes of a model.\n")[1])


def names(cell: str) -> list[str]:
    return [name.removeprefix("kv_cache.") for name in re.findall(r"`([\w.]+)`", cell)]


def last_cells(page: str) -> dict[str, list[str]]:
    """The last cells of the lines of each operation. A line without a name belongs to the operation of the line
    before."""
    if page == "replacements":
        lines = [(cells[1], cells[-1]) for module in MODULES for cells in replacements(module)]
        # One line has both passes.
        lines += [(BACKWARD, last) for runs, last in lines if "backward" in last]
    else:
        lines = [(cells[0], cells[-1]) for cells in backends()]
    found: dict[str, list[str]] = {}
    operations: list[str] = []
    for cell, last in lines:
        operations = [OPERATIONS.get(name, name) for name in names(cell) or [cell] if cell] or operations
        for operation in operations:
            found.setdefault(operation, []).append(last)
    return found


@pytest.mark.parametrize("module", MODULES)
def test_every_function_of_a_module_has_its_line(module):
    public = importlib.import_module(module)
    functions = {name for name in public.__all__ if callable(getattr(public, name))}
    assert {name for cells in replacements(module) for name in names(cells[0])} - {
        "indices",
        "sparse_mla_top_k",
    } == functions


def test_replacements_are_public():
    for module in MODULES:
        for cells in replacements(module):
            assert all(hasattr(flashlatte, name) or hasattr(kv_cache, name) for name in names(cells[1])), cells


@pytest.mark.parametrize("page", BOTH)
def test_a_dash_marks_functions_without_a_hopper_kernel(page):
    kernels = {
        name: set(last) - {NO_KERNEL} for name, last in last_cells(page).items() if name in dispatch.operations()
    }
    assert len(kernels) > 15
    assert {name for name, last in kernels.items() if last} == {name for name in kernels if has_kernel(name)}


@pytest.mark.parametrize(("pages", "operation", "words", "taken", "refused"), LIMITS)
def test_given_limits_are_used(pages, operation, words, taken, refused):
    for page in pages:
        assert words in "; ".join(last_cells(page)[operation])
    assert [refusal(operation, **facts) for facts in taken] == [None] * len(taken)
    assert None not in [refusal(operation, **facts) for facts in refused]
