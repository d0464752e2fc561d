"""Signatures of the functions of ``ops`` compared with vLLM's sources: arguments and their order.

They are read, not imported: of the installed vLLM, of those that ``.ci/peers.py`` fetched, and of those whose folders
``VLLM_SOURCES`` names (``…/vllm``, separated as in PATH).
"""

import ast
import functools
import importlib.util
import inspect
import os
import re
from pathlib import Path

import pytest
from support.peer_sources import MISSING, folders

from flashlatte.integrations.vllm import ops

PLACES = {
    "_custom_ops.py": (
        "concat_and_cache_mla",
        "concat_and_cache_mla_rope_fused",
        "concat_mla_q",
        "cp_gather_and_upconvert_fp8_kv_cache",
        "cp_gather_cache",
        "cp_gather_indexer_k_quant_cache",
        "gather_and_maybe_dequant_cache",
        "indexer_k_quant_and_cache",
        "reshape_and_cache",
        "reshape_and_cache_flash",
        "swap_blocks",
        "top_k_per_row_decode",
        "top_k_per_row_prefill",
    ),
    "v1/attention/backends/mla/sparse_utils.py": (
        "triton_convert_req_index_to_global_index",
        "triton_filter_and_convert_dcp_index",
    ),
    "v1/attention/ops/common.py": ("pack_seq_triton", "unpack_seq_triton"),
    "v1/attention/ops/merge_attn_states.py": ("merge_attn_states",),
    "v1/attention/ops/triton_decode_attention.py": ("decode_attention_fwd",),
    "v1/attention/ops/triton_reshape_and_cache_flash.py": (
        "triton_reshape_and_cache_flash",
        "triton_reshape_and_cache_flash_per_token_head_quant",
    ),
    "v1/attention/ops/triton_unified_attention.py": ("unified_attention",),
    "v1/attention/ops/triton_unified_attention_diffkv.py": ("unified_attention_diffkv",),
    "v1/attention/ops/vit_attn_wrappers.py": (
        "vit_flash_attn_wrapper",
        "vit_torch_sdpa_wrapper",
        "vit_triton_attn_wrapper",
    ),
}
FUNCTIONS = [(place, name) for place, names in PLACES.items() for name in names]
# vLLM operations without a Python function.
COMPILED = {"cooperative_topk", "persistent_topk"}
# Functions whose arguments differ in 0.20, where callers pass keywords.
OF_020 = {
    "cp_gather_and_upconvert_fp8_kv_cache": {"seq_lens"},
    "triton_reshape_and_cache_flash_per_token_head_quant": {"kv_quant_mode"},
    "unified_attention": set(),
}
# Not in 0.20.
LATER = {
    "top_k_per_row_decode",
    "top_k_per_row_prefill",
    "triton_filter_and_convert_dcp_index",
    "unified_attention_diffkv",
}
# 0.32 inserted BLOCK_STRIDE_ROWS before it: passed by position, it is refused as a number of columns.
MOVED = "NUM_TOPK_TOKENS"


def sources():
    found = [Path(folder) for folder in os.environ.get("VLLM_SOURCES", "").split(os.pathsep) if folder]
    found += [folder / "vllm" for folder in folders("vllm")]
    spec = importlib.util.find_spec("vllm")
    return found + [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else found


SOURCES = sources()


@functools.cache
def version(source):
    numbers = re.search(r"version = '(\d+)\.(\d+)", (source / "_version.py").read_text())
    assert numbers is not None
    return tuple(map(int, numbers.groups()))


@functools.cache
def functions(file):
    return {node.name: node.args for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_function_has_a_counterpart():
    assert {name for _, name in FUNCTIONS} | COMPILED | {"KV_CACHE_DTYPES"} == set(ops.__all__)


@pytest.mark.skipif(not SOURCES, reason=f"vLLM is not installed, and {MISSING}")
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: ".".join(map(str, version(source))))
@pytest.mark.parametrize(("place", "name"), FUNCTIONS, ids=[name for _, name in FUNCTIONS])
def test_arguments_are_vllms(source, place, name):
    oldest = version(source) == (0, 20)
    if oldest and name in LATER:
        return
    theirs = functions(source / place)[name]
    their_names = [argument.arg for argument in theirs.args]
    their_defaults = dict(zip(reversed(their_names), reversed(theirs.defaults), strict=False))
    ours = inspect.signature(getattr(ops, name)).parameters
    needed = {argument for argument, parameter in ours.items() if parameter.default is inspect.Parameter.empty}

    assert not theirs.kwonlyargs
    differ = OF_020.get(name, set()) if oldest else set()
    assert set(their_names) - set(ours) <= differ
    assert needed - set(their_names) <= differ
    # Arguments with a default in vLLM must have one here.
    assert needed & set(their_defaults) == set()
    for argument, default in their_defaults.items():
        if argument in ours and isinstance(default, ast.Constant):
            assert ours[argument].default == default.value, argument

    by_position = [
        argument for argument, parameter in ours.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    shared = next((i for i, (a, b) in enumerate(zip(their_names, by_position, strict=False)) if a != b), None)
    if shared is not None and not (oldest and name in OF_020):
        assert (their_names[shared], by_position[shared]) == ("BLOCK_STRIDE_ROWS", MOVED)
