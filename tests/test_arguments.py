"""Arguments of the wrong type raise an error that names them: no string counts as True, and no tensor is sparse."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
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
    "get_mqa_logits_metadata": ("cu_seq_len_k_end", "num_kv_tokens", "num_heads"),
    "get_paged_mqa_logits_metadata": ("block_kv", "indices"),
    "xqa_batch_decode_with_kv_cache_mla": ("qk_nope_head_dim", "max_seq_len", "enable_pdl"),
    "unpack_seq_triton": ("block_t", "block_d"),
    "triton_filter_and_convert_dcp_index": ("BLOCK_N",),
}
# Unused in these calls: scales of a cache that has none or others, workspaces, and a length that is not read.
UNREAD = {
    *("scale", "k_scale", "v_scale", "kv_cache_scale", "k_descale", "v_descale"),
    *("workspace_buffer", "max_seqlen"),
}
# PyTorch's error about the device says enough: lists of pages and counts, which may be on any, and scales.
COPIED = {
    *(
        (name, pages)
        for name in ("copy_blocks", "swap_blocks")
        for pages in ("src_pages", "dst_pages", "block_mapping")
    ),
    *(("dequantize", "scale"), ("quantize", "scale"), ("gather_and_maybe_dequant_cache", "num_tokens")),
    *(("pack_seq_triton", "lengths"), ("unpack_seq_triton", "lengths")),
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


def converted(kind: str, x: torch.Tensor) -> torch.Tensor | None:
    """The tensor in another layout; None if PyTorch cannot convert it."""
    convert: dict[str, Callable[[], torch.Tensor]] = {
        "scalar": lambda: torch.zeros((), dtype=x.dtype),
        "meta": lambda: x.to("meta"),
        "sparse_coo": x.to_sparse,
        "sparse_csr": x.to_sparse_csr,
        "mkldnn": x.to_mkldnn,
        "nested": lambda: torch.nested.nested_tensor(list(x)),
        "jagged": lambda: torch.nested.nested_tensor(list(x), layout=torch.jagged),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return convert[kind]()
        except (RuntimeError, TypeError, IndexError):
            return None


def replacements(arguments: dict[str, Any], kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The arguments with one tensor after the other in another layout, and the name of its argument."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            if (other := converted(kind, value)) is not None:
                yield name, arguments | {name: other}
        elif isinstance(value, (list, tuple)):
            for place, part in enumerate(value):
                if isinstance(part, torch.Tensor) and (other := converted(kind, part)) is not None:
                    yield name, arguments | {name: type(value)((*value[:place], other, *value[place + 1 :]))}


@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "mkldnn", "nested", "jagged"])
@pytest.mark.parametrize(("group", "name"), NAMES, ids=[name for _, name in NAMES])
def test_a_tensor_without_strides_is_refused(group: str, name: str, kind: str) -> None:
    function, arguments = call_of(group, name)
    complaints = []
    for parameter, changed in replacements(arguments, kind):
        message = refusal(function, changed)
        refused = re.search(rf"\b{parameter}\b.* must be .*, got (layout torch\.|a nested tensor)", message)
        unread = is_unused(function, parameter) or (message == "accepted" and parameter in UNREAD)
        if not refused and not unread:
            complaints.append(f"{parameter}: {message}")
    assert complaints == []


@pytest.mark.parametrize(("group", "name"), NAMES, ids=[name for _, name in NAMES])
def test_a_tensor_without_axes_is_refused_or_one_number(group: str, name: str) -> None:
    function, arguments = call_of(group, name)
    complaints = []
    for parameter, changed in replacements(arguments, "scalar"):
        message = refusal(function, changed)
        if not re.search(rf"\b{parameter}\b|^accepted$", message):
            complaints.append(f"{parameter}: {message}")
    assert complaints == []


def negated(x: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """Random numbers in a view with PyTorch's negative bit."""
    values = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    view = torch.complex(torch.zeros_like(values), values).requires_grad_(requires_grad).conj().imag
    assert view.is_neg()
    return view


@pytest.mark.filterwarnings("ignore:.* has no backward")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("group", "name"), NAMES, ids=[name for _, name in NAMES])
def test_a_negated_view_is_refused_or_has_its_values(group: str, name: str, requires_grad: bool) -> None:
    for parameter, value in call_of(group, name)[1].items():
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or value.numel() < 2:
            continue
        view, function = negated(value, requires_grad), call_of(group, name)[0]
        message = refusal(function, call_of(group, name)[1] | {parameter: view})
        if message != "accepted":
            assert parameter in message or "if gradients are recorded" in message
            continue
        calls = [call_of(group, name)[1] | {parameter: x} for x in (view, view.detach().resolve_neg())]
        results = [[*flat(function(**call)), *flat(call)] for call in calls]
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0, equal_nan=True)


def flat(value: object) -> Iterator[torch.Tensor]:
    """All tensors in a result or in arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from flat(part)


@pytest.mark.parametrize(("group", "name"), NAMES, ids=[name for _, name in NAMES])
def test_one_meta_tensor_among_others_is_refused_or_unused(group: str, name: str) -> None:
    function, arguments = call_of(group, name)
    for parameter, changed in replacements(arguments, "meta"):
        if (name, parameter) in COPIED:
            continue
        message = refusal(function, changed)
        assert parameter in message or re.search(r"must be on meta like|^accepted$", message), message


def refusal(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """The message of the error that a call raises."""
    try:
        function(**arguments)
    except (TypeError, ValueError) as error:
        return str(error)
    return "accepted"
