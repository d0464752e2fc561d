"""Signatures of FlashMLA and DeepGEMM in the wheels of vLLM and SGLang, compared with their replacements.

A new function or argument there fails a test here, which names it.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.peer_sources import FOLDER, MISSING, folders, functions, listed

from flashlatte import deep_gemm, flash_mla, kv_cache, sparse_decode, sparse_prefill
from flashlatte.flash_mla import decode, prefill
from flashlatte.integrations.sglang import attention
from flashlatte.testing.cases import SparseDecodeCase, SparsePrefillCase

# Files within a wheel, and the module that replaces them.
PLACES = [
    ("sgl-flash-mla", "flash_mla/flash_mla_interface.py", flash_mla),
    ("vllm", "vllm/third_party/flashmla/flash_mla_interface.py", flash_mla),
    ("sgl-deep-gemm", "deep_gemm/__init__.py", deep_gemm),
    ("vllm", "vllm/third_party/deep_gemm/_C.py", deep_gemm),
]
# Places that are a compiled module in a version.
COMPILED = {("vllm-0.20.2", "vllm/third_party/deep_gemm/_C.py")}
# Functions behind the public ones.
PRIVATE = {"backward", "forward"}
# Arguments whose position differs between versions, and is detected by type.
BY_TYPE = {
    "flash_mla_with_kvcache": (decode.LAST, decode.LAST_IN_VLLM),
    "flash_mla_sparse_fwd": (prefill.LAST, prefill.LAST_IN_VLLM),
    "fp8_fp4_mqa_logits": (("max_seqlen_k", "schedule_meta"),),
    "fp8_fp4_paged_mqa_logits": (("indices",),),
}
# Defaults here that take calls of all versions.
OWN_DEFAULTS = {"is_fp8_kvcache", "use_legacy", "clean_logits", "max_seqlen_k"}
# Shorter names, passed by position.
RENAMED = {"fp8_mqa_logits": {"ks": "cu_seq_len_k_start", "ke": "cu_seq_len_k_end"}}

pytestmark = pytest.mark.skipif(not folders("vllm"), reason=MISSING)


def counterparts() -> Iterator[Any]:
    for wheel, place, ours in PLACES:
        for folder in folders(wheel):
            file = folder / place
            if not file.exists():
                if (folder.name, place) not in COMPILED:
                    yield pytest.param(place, None, ours, id=f"{folder.name} {place}")
                continue
            for name, node in functions(file).items():
                is_ours = ours is flash_mla or "mqa_logits" in name or name.endswith("_num_sms")
                if is_ours and not name.startswith("_") and name not in PRIVATE:
                    yield pytest.param(name, node.args, ours, id=f"{folder.name} {name}")


@pytest.mark.parametrize("version", listed())
def test_version_is_compared(version: str) -> None:
    if not (FOLDER / version).is_dir():
        pytest.skip(f"{version} is not compared: python .ci/peers.py build/peers")


@pytest.mark.parametrize(("name", "theirs", "ours"), [*counterparts()])
def test_arguments_are_the_originals(name: str, theirs: ast.arguments | None, ours: Any) -> None:
    assert theirs is not None, f"{name} was moved or removed"
    assert name in ours.__all__, f"{name} has no counterpart"
    parameters = inspect.signature(getattr(ours, name)).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        assert name == "get_mla_metadata"
        return
    renamed = RENAMED.get(name, {})
    names = [renamed.get(argument.arg, argument.arg) for argument in theirs.args]
    assert [argument for argument in names if argument not in parameters] == [], f"new arguments of {name}"
    by_position = [argument for argument, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    shared = next((i for i, (a, b) in enumerate(zip(names, by_position, strict=False)) if a != b), len(by_position))
    last = tuple(names[shared:])
    assert not last or any(last == known[: len(last)] for known in BY_TYPE.get(name, ())), f"order of {name}: {last}"
    defaults = dict(zip(reversed(names), reversed(theirs.defaults), strict=False))
    needed = {argument for argument, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL}
    assert needed <= set(names) - set(defaults), f"arguments of {name} that callers need not pass"
    for argument, default in defaults.items():
        if isinstance(default, ast.Constant) and argument not in OWN_DEFAULTS:
            assert parameters[argument].default == default.value, f"the default of {argument}"


def test_names_exported_by_flash_mla() -> None:
    """All except fused attention, which SGLang imports and calls for V4.1 on Blackwell only."""
    for folder in folders("sgl-flash-mla"):
        tree = ast.parse((folder / "flash_mla" / "__init__.py").read_text())
        (exported,) = (node.value for node in tree.body if isinstance(node, ast.Assign) and _names(node) == ["__all__"])
        assert set(ast.literal_eval(exported)) - set(flash_mla.__all__) == {"fused_norm_rope_attn_rope_cast"}


def _names(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


def newest(wheel: str, place: str) -> Path:
    return folders(wheel)[-1] / place


def defined(place: str, names: list[str], space: dict[str, Any]) -> dict[str, Any]:
    """Functions of one of vLLM's files, executed with ``space`` in place of its imports."""
    nodes = functions(newest("vllm", place))
    module = ast.Module([nodes[name] for name in names], [])
    exec(compile(module, place, "exec", annotations.compiler_flag, True), space)
    return space


def vllms(names: list[str]) -> dict[str, Any]:
    """vLLM's wrappers of DeepGEMM's functions, around the replacements."""
    space: dict[str, Any] = {"torch": torch, "_lazy_init": lambda: None, "_missing": None}
    space |= {f"_{name}_impl": getattr(deep_gemm, name) for name in names}
    space["_paged_mqa_logits_schedule_slots"] = lambda num_sms, _: num_sms
    return defined("vllm/utils/deep_gemm.py", names, space)


def test_vllms_calls_of_the_indexer_run() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(6, 32, 128, generator=generator).to(torch.float8_e4m3fn)
    k = torch.randn(64, 128, generator=generator).to(torch.float8_e4m3fn)
    scales, weights = torch.rand(64, generator=generator) + 0.5, torch.randn(6, 32, generator=generator)
    start, end = torch.zeros(6, dtype=torch.int32), torch.arange(11, 71, 10, dtype=torch.int32).clamp(max=64)
    expected = torch.einsum("mhd,nd->mhn", q.float(), k.float() * scales.unsqueeze(1)).relu()
    expected = torch.einsum("mh,mhn->mn", weights, expected)
    space = vllms(["fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits", "get_paged_mqa_logits_metadata"])
    logits = space["fp8_fp4_mqa_logits"]((q, None), (k, scales), weights, start, end, 64)
    cache = torch.cat((k.view(torch.uint8).flatten(), scales.view(torch.uint8))).view(1, 64, 1, 132)
    table = torch.zeros(6, 1, dtype=torch.int32)
    schedule = space["get_paged_mqa_logits_metadata"](end.unsqueeze(1), 64, 132)
    paged = space["fp8_fp4_paged_mqa_logits"](
        (q.unsqueeze(1), None), cache, weights, end.unsqueeze(1), table, schedule, 64
    )
    for row, length in enumerate(end.tolist()):
        for result in (logits, paged):
            torch.testing.assert_close(result[row, :length], expected[row, :length])


def test_vllms_calls_of_candidate_blocks_run() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (3, 32, 64), generator=generator).to(torch.uint8).view(torch.int8)
    keys = torch.randint(0, 256, (40, 64), generator=generator).to(torch.uint8).view(torch.int8)
    q_scale, k_scale = (
        torch.full((3, 32), 0x7F7F7F7F, dtype=torch.int32),
        torch.full((40,), 0x7F7F7F7F, dtype=torch.int32),
    )
    weights = torch.randn(3, 32, generator=generator).bfloat16()
    start, end = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([40, 30, 35], dtype=torch.int32)
    space = vllms(["get_sparse_mqa_logits_metadata", "fp8_fp4_sparse_mqa_logits"])
    blocks = torch.tensor([[0, 4], [1, 2], [1, 1]], dtype=torch.int32)
    metadata = space["get_sparse_mqa_logits_metadata"](start, end, 40, blocks, torch.int8, 8)
    logits = space["fp8_fp4_sparse_mqa_logits"]((codes, q_scale), (keys, k_scale), weights, metadata, 2, 8)
    full = deep_gemm.fp8_fp4_mqa_logits(
        (codes, q_scale), (keys, k_scale), weights, start, end, logits_dtype=torch.float32
    )
    position = (blocks.long() * 8 + (start % 8).long().unsqueeze(1)).unsqueeze(2) + torch.arange(8)
    torch.testing.assert_close(logits, full.gather(1, position.flatten(1)).bfloat16())


@pytest.mark.parametrize("heads", [16, 64])
def test_vllms_sparse_attention_runs(heads: int) -> None:
    """Methods of its backend FLASHMLA_SPARSE: decode over an fp8 cache, and over an unquantized one."""
    space = {"torch": torch, "logger": SimpleNamespace(warning_once=print)}
    space |= {name: getattr(flash_mla, name) for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")}
    names = ["_fp8_flash_mla_kernel", "_bf16_flash_mla_kernel"]
    defined("vllm/v1/attention/backends/mla/flashmla_sparse.py", names, space)
    inputs = SparseDecodeCase(2, 1, 90, heads, 64, attn_sink=False).inputs()
    backend = SimpleNamespace(fp8_decode_padded_heads=64, prefill_padding=64, softmax_scale=inputs["softmax_scale"])
    schedule, _ = flash_mla.get_mla_metadata()
    metadata = SimpleNamespace(dummy_block_table=None, cache_lens=None, scheduler_metadata=schedule)
    out, lse = space[names[0]](backend, inputs["q"], inputs["k_cache"].squeeze(2), inputs["indices"], metadata)
    expected = sparse_decode(**inputs, empty_lse=math.inf, backend="reference")
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected[1])
    rows = kv_cache.unpack(inputs["k_cache"]).flatten(0, 1)
    out, lse = space[names[1]](backend, inputs["q"].squeeze(1), rows, inputs["indices"].squeeze(1))
    torch.testing.assert_close(out, expected[0].squeeze(1))
    torch.testing.assert_close(lse, expected[1].squeeze(2))


# Modules of vLLM and SGLang with replaced functions. SGLang's own wrappers of FlashMLA's are hooked.
ORIGINS = {
    "deep_gemm": deep_gemm,
    "flash_mla": flash_mla,
    "vllm.v1.attention.ops.flashmla": flash_mla,
    "sglang.kernels.ops.attention.flash_mla_interface": attention,
}


def called(node: ast.Call, origins: dict[str, set[str]]) -> Any:
    """The replacement of the function that a call names; None for other functions."""
    function = node.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return getattr(ORIGINS.get(function.value.id), function.attr, None)
    if not isinstance(function, ast.Name) or len(origins.get(function.id, ())) != 1:
        return None
    (origin,) = origins[function.id]
    return getattr(ORIGINS.get(origin), function.id, None)


def calls(folder: Path) -> Iterator[tuple[str, ast.Call, Any]]:
    """Calls in a project of replaced functions: location, call, and replacement."""
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text()
        if "mqa_logits" not in text and "flash_mla_" not in text:
            continue
        nodes = list(ast.walk(ast.parse(text)))
        origins: dict[str, set[str]] = {}
        for node in nodes:
            if not isinstance(node, ast.ImportFrom):
                continue
            for alias in node.names:
                origins.setdefault(alias.asname or alias.name, set()).add(node.module or "")
        for node in nodes:
            if isinstance(node, ast.Call) and (ours := called(node, origins)) is not None:
                yield f"{file.relative_to(folder)}:{node.lineno}", node, ours


@pytest.mark.parametrize("wheel", ["vllm", "sglang"])
def test_calls_are_accepted(wheel: str) -> None:
    folder = folders(wheel)[-1]
    found, refused = list(calls(folder)), []
    for place, call, ours in found:
        signature = inspect.signature(ours)
        # A hook takes the original function first.
        positional = [None] * (len(call.args) + ("original" in signature.parameters))
        keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
        is_partial = any(isinstance(one, ast.Starred) for one in call.args) or len(keywords) < len(call.keywords)
        try:
            (signature.bind_partial if is_partial else signature.bind)(*positional, **keywords)
        except TypeError as error:
            refused.append(f"{place}: {error}")
    assert len(found) > 10
    assert refused == []


@pytest.fixture
def sglangs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's module around FlashMLA's functions, with the replacements."""
    for module in ("flash_mla", "flash_mla.flash_mla_interface", "flash_mla.fused_norm_rope_attn_rope_cast"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
        sys.modules[module].__dict__.update({name: getattr(flash_mla, name) for name in flash_mla.__all__})
    sys.modules["flash_mla"].__dict__["fused_norm_rope_attn_rope_cast"] = None
    file = newest("sglang", "sglang/kernels/ops/attention/flash_mla_interface.py")
    spec = importlib.util.spec_from_file_location("sglangs_flash_mla_interface", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("cache_format", ["v32", "v32_no_rope", "model1", "v41"])
@pytest.mark.parametrize("has_tensors", [False, True])
def test_sglangs_sparse_decode_runs(sglangs: Any, cache_format: str, has_tensors: bool) -> None:
    if has_tensors and cache_format in ("model1", "v41"):
        pytest.skip("SGLang's schedules as tensors are for V3.2")
    inputs = SparseDecodeCase(2, 1, 90, 64, 64, cache_format=cache_format, attn_sink=False).inputs()
    lengths = torch.full((2,), 90, dtype=torch.int32)
    schedule, num_splits = sglangs.get_mla_metadata(*((lengths, 64, 1, 64, True, 64) if has_tensors else ()))
    names = {"v32": "V32", "v32_no_rope": "V32_NO_ROPE", "model1": "V4", "v41": None}
    results = sglangs.flash_mla_with_kvcache(
        q=inputs["q"],
        k_cache=inputs["k_cache"],
        block_table=torch.empty(2, 0, dtype=torch.int32),
        cache_seqlens=lengths,
        head_dim_v=512,
        tile_scheduler_metadata=schedule,
        num_splits=num_splits,
        softmax_scale=inputs["softmax_scale"],
        is_fp8_kvcache=True,
        indices=inputs["indices"],
        kv_format=None if has_tensors else names[cache_format],
        # KVLayout.V41_NEW, the one with contiguous tokens.
        use_legacy=cache_format != "v41",
    )
    expected = sparse_decode(**inputs, empty_lse=math.inf, backend="reference")
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted)


def test_sglangs_sparse_prefill_runs(sglangs: Any) -> None:
    inputs = SparsePrefillCase(5, 90, 64, 64).inputs()
    call = [inputs[name] for name in ("q", "kv", "indices", "softmax_scale")]
    natural = sglangs.flash_mla_sparse_fwd(*call, use_legacy=False)
    base_2 = sglangs.flash_mla_sparse_fwd(*call)
    expected = sparse_prefill(*call, backend="reference")
    for result, other, wanted in zip(natural, base_2, expected, strict=True):
        torch.testing.assert_close(result, wanted)
        torch.testing.assert_close(other, wanted if wanted.dim() == 3 else wanted / math.log(2))


def test_sglangs_names_of_cache_layouts() -> None:
    """A new layout must be either supported, or listed among those that SGLang keeps (docs/guide/sglang.md)."""
    place = "sglang/kernels/ops/attention/dsv4/kv_layout.py"
    tree = ast.parse(newest("sglang", place).read_text())
    (layouts,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "KVLayout")
    members = {name for node in layouts.body if isinstance(node, ast.Assign) for name in _names(node)}
    assert members == {"V4", "V41", "V41_FP4", "UNIFORM_FP8", "V41_NEW", "V41_FP4_NEW"}
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "sglang.md").read_text()
    # TensorRT-LLM's, which no function that is hooked reads.
    assert [name for name in members - {"V4", "UNIFORM_FP8"} if name not in guide] == []
