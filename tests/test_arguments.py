"""Options of the wrong type raise an error that names the argument: no string counts as True, no bool as a number."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support import drop_in_calls, public_calls

import flashlatte
from flashlatte import deep_gemm, flash_mla, flashinfer, kv_cache
from flashlatte.integrations.vllm import ops

GROUPS: dict[str, tuple[Callable[[], list[public_calls.Call]], tuple[ModuleType, ...]]] = {
    "flashlatte": (public_calls.operations, (flashlatte, kv_cache)),
    "flash_mla": (drop_in_calls.of_flash_mla, (flash_mla,)),
    "deep_gemm": (drop_in_calls.of_deep_gemm, (deep_gemm,)),
    "flashinfer": (drop_in_calls.of_flashinfer, (flashinfer,)),
    "vllm": (drop_in_calls.of_vllm, (ops,)),
}
NAMES = [(group, function.__name__) for group, (calls, _) in GROUPS.items() for function, _ in calls()]
# Values of the wrong type for a parameter annotated so; None too, if the annotation does not accept it.
WRONG = {"bool": ("x", 0, 1, 1.5, torch.tensor(True)), "int": ("1", True, 1.5), "float": ("1", True)}
# Documented as unused in the function that they name ("as in ``top_k``"), or in words.
UNUSED = {
    **dict.fromkeys(("top_k_page_table_transform", "top_k_ragged_transform"), ("deterministic", "dsa_graph_safe")),
    "get_mla_decoding_metadata": ("num_q_tokens_per_head_k", "h_k", "h_q", "is_fp8_kvcache", "topk", "use_legacy"),
    "get_mqa_logits_metadata": ("num_kv_tokens", "num_heads"),
    "get_paged_mqa_logits_metadata": ("block_kv",),
    "xqa_batch_decode_with_kv_cache_mla": ("qk_nope_head_dim", "max_seq_len", "enable_pdl"),
    "unpack_seq_triton": ("block_t", "block_d"),
    "triton_filter_and_convert_dcp_index": ("BLOCK_N",),
}
# The type of these selects between two orders of arguments, or they have no effect without another argument.
BY_TYPE = {
    "fp8_fp4_mqa_logits": ("clean_logits", "max_seqlen_k"),
    "fp8_mqa_logits": ("clean_logits", "max_seqlen_k"),
    "fp8_fp4_paged_mqa_logits": ("clean_logits",),
    "fp8_paged_mqa_logits": ("clean_logits",),
    "trtllm_batch_decode_with_kv_cache_mla": ("enable_dcp", "cp_world", "cp_rank"),
    "triton_reshape_and_cache_flash": ("interleaved_v_pack_factor",),
    "decode_attention_fwd": ("logit_cap", "k_scale", "v_scale"),
    "unified_attention": ("rswa_window", "output_scale"),
}


def call_of(group: str, name: str) -> public_calls.Call:
    return next(call for call in GROUPS[group][0]() if call[0].__name__ == name)


def is_unused(function: Callable[..., Any], parameter: str) -> bool:
    text = " ".join((inspect.getdoc(function) or "").split())
    return parameter in UNUSED.get(function.__name__, ()) or bool(re.search(rf"\b{parameter}\b[\w, ]*: unused", text))


@pytest.mark.parametrize("group", GROUPS)
def test_every_public_function_has_a_call(group: str) -> None:
    calls, modules = GROUPS[group]
    # ``kv_cache.__all__`` lacks the operations, which are defined above it.
    names = [
        (module, name) for module in modules for name in {*module.__all__, *(dir(kv_cache) * (module is kv_cache))}
    ]
    public = {function for module, name in names if inspect.isfunction(function := getattr(module, name))}
    called = {function for function, _ in calls()}
    # It takes anything, as FlashMLA's does.
    missing = {function for function in public - called if inspect.signature(function).parameters}
    assert missing <= {flash_mla.get_mla_metadata}
    assert called <= public


@pytest.mark.parametrize(("group", "name"), NAMES, ids=[name for _, name in NAMES])
def test_an_option_of_the_wrong_type_is_refused(group: str, name: str) -> None:
    function, arguments = call_of(group, name)
    function(**arguments)
    complaints = []
    for parameter in inspect.signature(function).parameters.values():
        annotation = str(parameter.annotation).split(" | ")
        if is_unused(function, parameter.name) or parameter.name in BY_TYPE.get(name, ()):
            continue
        wrong = [value for kind in annotation for value in WRONG.get(kind, ())] if "Tensor" not in annotation else []
        for value in (*wrong, *(() if "None" in annotation or not wrong else (None,))):
            message = refusal(function, call_of(group, name)[1] | {parameter.name: value})
            if not re.search(rf"\b{parameter.name}\b", message):
                complaints.append(f"{parameter.name}={value!r}: {message}")
    assert complaints == []


def refusal(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """The message of the error that a call raises."""
    try:
        function(**arguments)
    except (TypeError, ValueError) as error:
        return str(error)
    return "accepted"
