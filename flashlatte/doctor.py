"""``flashlatte doctor``: versions, device, and the implementation that each operation would use, with reasons."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import flashlatte
from flashlatte import ops
from flashlatte.distributed import diagnostics as ranks
from flashlatte.integrations.sglang import diagnostics as sglang
from flashlatte.integrations.vllm import diagnostics as vllm
from flashlatte.kv_cache import FORMAT_NAMES, get_format
from flashlatte.kv_cache.v41 import V41Format, V41Fp4Format
from flashlatte.layers import MLAConfig, V4Config, V41Config
from flashlatte.layers.models import text_config
from flashlatte.layers.v4.config import MODEL_TYPE as V4_MODEL_TYPE
from flashlatte.layers.v4.workspace import DEFAULT_LIMITS
from flashlatte.layers.v41.config import MODEL_TYPE as V41_MODEL_TYPE
from flashlatte.runtime import dispatch, machine

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PACKAGES = ("triton", "transformers")
DEEPSEEK_V3 = MLAConfig(hidden_size=7168, num_attention_heads=128, q_lora_rank=1536)
# Latent and rotated dims of DeepSeek-V4's rows.
V4_ROW = (448, 64)
H100 = machine.GPU((9, 0), 132)
# Width of the column of operation names.
NAME_COLUMN_WIDTH = 72


def diagnose(dtype: str = "bf16", model: str | Path | None = None) -> dict[str, Any]:
    """Collect versions, device and dispatch choices.

    Args:
        dtype: dtype of the queries: "bf16", "fp16" or "fp32".
        model: a model's ``config.json``, or its directory; DeepSeek-V3's shape if None.

    Raises:
        OSError, ValueError: an unreadable file, or one that is not an MLA model's config.
    """
    ops.load()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    fields = None if model is None else read_fields(model)
    model_type = _model_type(fields)
    v4 = model_type in (V4_MODEL_TYPE, V41_MODEL_TYPE)
    config = None if fields is None or v4 else MLAConfig.from_transformers(fields)
    description = None if config is None else _describe_model(config)
    if model_type == V4_MODEL_TYPE:
        layers = V4Config.layers(fields)
        description, calls = _describe_v4(layers), v4_calls(device, DTYPES[dtype], layers)
    elif model_type == V41_MODEL_TYPE:
        layers = V41Config.layers(fields)
        description, calls = _describe_v4(layers), v41_calls(device, DTYPES[dtype], layers)
    else:
        calls = typical_calls(device, DTYPES[dtype], config)
    return {
        "versions": {
            "flashlatte": flashlatte.__version__,
            "python": platform.python_version(),
            # Unlike the package's metadata, it includes the build (+cpu, +cu130).
            "torch": str(torch.__version__),
            **{name: _version(name) for name in PACKAGES},
        },
        "device": _describe(device),
        "ranks": ranks.diagnose(),
        "dtype": dtype,
        "model": description,
        "operations": [_choices(call) for call in calls],
        "on_an_h100": _supported_on_hopper(calls) if device.type == "cpu" else None,
        "vllm": vllm.diagnose(DTYPES[dtype], config, v4=v4, model_type=model_type),
        "sglang": sglang.diagnose(config, v4=v4),
        "compiled": _compiled(model, dtype) if model and torch.cuda.is_available() and dtype != "fp32" else None,
    }


def _model_type(fields: Mapping[str, Any] | None) -> str | None:
    """The model_type of the language model."""
    if fields is None:
        return None
    # V4.1's language model has a name of its own.
    return V41_MODEL_TYPE if fields.get("model_type") == V41_MODEL_TYPE else text_config(fields).get("model_type")


def read_fields(path: str | Path) -> dict[str, Any]:
    """The content of a model's ``config.json``, given by its path or directory.

    Raises:
        OSError, ValueError: a file that cannot be read, or is no JSON object; names the file.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise OSError(
            f"model must be a config.json or its folder, and {file} cannot be read: {error.strerror}"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"model must be a config.json, and {file} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"model must be a config.json, and {file} holds no object")
    return fields


def typical_calls(device: torch.device, dtype: torch.dtype, model: MLAConfig | None = None) -> list[dispatch.CallSpec]:
    """One call of every operation and cache format, in the shape of ``model``.

    Without a model, they have DeepSeek-V3's shape, or V4's for V4's formats.
    """
    config = model or DEEPSEEK_V3
    plain = next(name for name, value in DTYPES.items() if value == dtype)
    heads: dict[str, Any] = {"h_q": config.num_attention_heads, "h_kv": 1}
    widths = dict.fromkeys((plain, "fp8", *_formats_of(config.kv_lora_rank, config.qk_rope_head_dim)), config.head_dim)
    if model is None:
        widths |= dict.fromkeys(_formats_of(*V4_ROW), sum(V4_ROW))

    def over(operation: str, cache_format: str) -> dispatch.CallSpec:
        width = widths[cache_format]
        layout = get_format(cache_format)
        value = config.kv_lora_rank if layout.plain else layout.value_dim
        return dispatch.CallSpec(operation, device, dtype, cache_format, 64, width, value, **heads)

    calls = [over("dense_decode", name) for name in widths if get_format(name).plain]
    calls += [over("sparse_decode", name) for name in widths if not get_format(name).takes_scale]
    shared = {"head_dim": config.head_dim, "head_dim_v": config.kv_lora_rank}
    calls += [
        dispatch.CallSpec(name, device, dtype, **shared, **heads)
        for name in ("sparse_prefill", "sparse_attention_backward")
    ]
    index_dim = None if config.indexer is None else config.indexer.head_dim
    loss_sizes: dict[str, Any] = {"head_dim": config.head_dim, "index_dim": index_dim, **heads}
    calls.append(dispatch.CallSpec("indexer_loss", device, dtype, **loss_sizes))
    per_head: dict[str, Any] = {
        "head_dim": config.qk_head_dim,
        "head_dim_v": config.v_head_dim,
        "h_q": config.num_attention_heads,
        "h_kv": config.num_attention_heads,
    }
    calls += [
        dispatch.CallSpec(name, device, dtype, **per_head) for name in ("dense_prefill", "dense_prefill_backward")
    ]
    calls.append(dispatch.CallSpec("merge_states", device, dtype, head_dim_v=config.v_head_dim))
    widest = max(config.kv_lora_rank, config.q_lora_rank or 0)
    calls.append(dispatch.CallSpec("latent_rows", device, dtype, head_dim=widest))
    calls.append(dispatch.CallSpec("rotate_heads", device, dtype, head_dim=config.qk_rope_head_dim))
    for operation in ("cache_write", "cache_gather"):
        for name, width in widths.items():
            calls.append(dispatch.CallSpec(operation, device, dtype, name, page_size=64, head_dim=width))
    calls.append(dispatch.CallSpec("paged_attention", device, dtype, page_size=16, head_dim=128, head_dim_v=128))
    for operation in ("turboquant_store", "turboquant_decode", "turboquant_gather"):
        calls.append(dispatch.CallSpec(operation, device, dtype, page_size=16, head_dim=128, head_dim_v=128))
    for operation in ("index_logits", "paged_index_logits"):
        if config.indexer is None:
            calls.append(dispatch.CallSpec(operation, device, torch.float8_e4m3fn, page_size=64, head_dim=128))
        else:
            sizes: dict[str, Any] = {"head_dim": config.indexer.head_dim, "h_q": config.indexer.num_heads}
            for name, query in (("index_fp8", torch.float8_e4m3fn), ("index_bf16", torch.bfloat16)):
                calls.append(dispatch.CallSpec(operation, device, query, name, 64, **sizes))
    covered = {call.operation for call in calls}
    calls += [dispatch.CallSpec(name, device, dtype) for name in dispatch.operations() if name not in covered]
    return calls


def v4_calls(device: torch.device, dtype: torch.dtype, layers: Sequence[V4Config]) -> list[dispatch.CallSpec]:
    """One call of every operation of DeepSeek-V4's layers and every cache format."""
    config, indexer = layers[0], next((layer.indexer for layer in layers if layer.indexer is not None), None)
    width, heads = config.head_dim, config.num_attention_heads
    plain = next(name for name, value in DTYPES.items() if value == dtype)
    formats = [plain, *_formats_of(width - config.rope_dim, config.rope_dim)]
    attention: dict[str, Any] = {"head_dim": width, "head_dim_v": width, "h_q": heads, "h_kv": 1}

    def over(operation: str, names: Sequence[str], **sizes: Any) -> list[dispatch.CallSpec]:
        return [dispatch.CallSpec(operation, device, dtype, name, 64, **sizes) for name in names]

    calls = [dispatch.CallSpec("q_kv_norm", device, dtype, head_dim=max(width, config.q_lora_rank))]
    calls += over("rotate_and_cache", formats, head_dim=width, h_q=heads)
    calls += over("compress", formats, head_dim=width)
    if indexer is not None:
        index: dict[str, Any] = {"head_dim": indexer.head_dim, "h_q": indexer.num_heads}
        calls += over("compress", ("index_fp8", "index_bf16"), head_dim=indexer.head_dim)
        calls.append(dispatch.CallSpec("index_query", device, dtype, **index))
        for name, query in (("index_fp8", torch.float8_e4m3fn), ("index_bf16", torch.bfloat16)):
            calls.append(dispatch.CallSpec("paged_index_logits", device, query, name, 64, **index))
        calls.append(dispatch.CallSpec("topk", device, torch.float32))
    calls.append(dispatch.CallSpec("index_convert", device, torch.int32))
    calls += over("sparse_decode", formats, **attention)
    calls += over("cache_gather", formats, head_dim=width)
    calls.append(dispatch.CallSpec("index_workspace", device, torch.int32))
    calls.append(dispatch.CallSpec("sparse_prefill", device, dtype, **attention))
    calls.append(dispatch.CallSpec("rotate_heads", device, dtype, head_dim=config.rope_dim, h_q=heads))
    return calls


def v41_calls(device: torch.device, dtype: torch.dtype, layers: Sequence[V41Config]) -> list[dispatch.CallSpec]:
    """One call of every operation of DeepSeek-V4.1's layers and every cache format."""
    calls, config = v4_calls(device, dtype, layers), layers[0]
    width = config.head_dim
    attention: dict[str, Any] = {"head_dim": width, "head_dim_v": width, "h_q": config.num_attention_heads, "h_kv": 1}
    formats = [call.cache_format for call in calls if call.operation == "cache_gather"]
    if V41Format.name in formats:
        attention["extra_cache_format"] = V41Fp4Format.name
        calls.append(dispatch.CallSpec("sparse_decode", device, dtype, V41Format.name, 64, **attention))
    calls += [dispatch.CallSpec("cache_write", device, dtype, name, 64, head_dim=width) for name in formats]
    indexer = next((layer.indexer for layer in layers if layer.candidates is not None), None)
    if indexer is not None:
        index: dict[str, Any] = {"head_dim": indexer.head_dim, "h_q": indexer.num_heads}
        for name, query in (("index_fp8", torch.float8_e4m3fn), ("index_bf16", torch.bfloat16)):
            calls.append(dispatch.CallSpec("sparse_index_logits", device, query, name, 64, **index))
    return calls


def _formats_of(latent_dim: int, rope_dim: int) -> list[str]:
    """The quantised formats for rows of these sizes."""
    layouts = [layout for layout in map(get_format, FORMAT_NAMES) if not layout.plain]
    return [layout.name for layout in layouts if (layout.latent_dim, layout.rope_dim) == (latent_dim, rope_dim)]


def report(facts: dict[str, Any], *, every_reason: bool = False) -> str:
    """The facts as text: one screen, or with ``every_reason`` the reason for each implementation that does not run."""
    device = facts["device"]
    lines = ["  ".join(f"{name} {version or 'not installed'}" for name, version in facts["versions"].items())]
    lines += [", ".join([device["name"], *device["facts"]]), ranks.report(facts["ranks"])]
    if facts["model"] is not None:
        lines.append(facts["model"])
    if facts["vllm"]["version"] is not None:
        lines += vllm.report(facts["vllm"])
    lines += sglang.report(facts["sglang"])
    lines.append("")
    on_gpu = device["type"] != "cpu"
    # Without a GPU, the reason is the same for all operations.
    shows_reasons = every_reason or on_gpu
    operations = facts["operations"]
    for operation in operations if every_reason else _merge_entries(operations, by_reasons=on_gpu):
        label = operation["operation"] + (f" over {operation['cache_format']}" if operation["cache_format"] else "")
        lines.append(f"{label:<{NAME_COLUMN_WIDTH}}{operation['runs'] or 'not supported here'}")
        if shows_reasons:
            reasons = operation["refusals"] if every_reason else _reasons(operation)
            lines += [f"    not {name}: it {reason}" for name, reason in reasons.items()]
    if facts["compiled"] is not None:
        lines += ["", facts["compiled"]]
    if not every_reason:
        lines += ["", *([] if on_gpu else [_describe_gpu_support(facts)])]
        lines.append("flashlatte doctor --all gives the reason for every implementation that does not run.")
    return "\n".join(lines)


def _compiled(model: str | Path, dtype: str) -> str:
    """The number of the model's kernels that are not compiled yet, as text."""
    # A process that collects kernels cannot launch any, so it is a separate one.
    command = [sys.executable, "-m", "flashlatte", "compile", "--list", "--json", "--model", str(model)]
    done = subprocess.run([*command, "--dtype", dtype], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"Kernels cannot be compiled ahead: {done.stderr.strip()}"
    facts = json.loads(done.stdout)
    missing, all_kernels = len(facts["missing"]), len(facts["kernels"])
    text = f"{missing} of the {all_kernels} kernels of the model's steps are not compiled yet"
    option = "" if dtype == "bf16" else f" --dtype {dtype}"
    return text + (f": flashlatte compile --model {model}{option}" if missing else "")


def _exists(refusal: str) -> bool:
    """Whether an implementation that cannot run exists."""
    return not refusal.startswith("has no ")


def _merge_entries(operations: list[dict[str, Any]], by_reasons: bool) -> list[dict[str, Any]]:
    """Merge entries for a shorter report.

    Entries that differ only in the cache format become one, and consecutive entries without a format share a line.
    With ``by_reasons``, entries with different reasons are not merged.
    """
    merged: dict[Any, dict[str, Any]] = {}
    for entry in operations:
        key = (entry["operation"], entry["runs"], *(entry["refusals"].items() if by_reasons else ()))
        if key in merged:
            merged[key]["cache_format"] += f", {entry['cache_format']}"
        else:
            merged[key] = dict(entry)
    lines: list[dict[str, Any]] = []
    for entry in merged.values():
        if lines and _can_share_line(lines[-1], entry, by_reasons):
            lines[-1]["operation"] += f", {entry['operation']}"
        else:
            lines.append(entry)
    return lines


def _reasons(entry: dict[str, Any]) -> dict[str, str]:
    """The reasons why existing implementations do not run."""
    return {name: reason for name, reason in entry["refusals"].items() if _exists(reason)}


def _can_share_line(before: dict[str, Any], entry: dict[str, Any], by_reasons: bool) -> bool:
    if before["cache_format"] or entry["cache_format"] or before["runs"] != entry["runs"]:
        return False
    if by_reasons and _reasons(before) != _reasons(entry):
        return False
    return len(before["operation"]) + len(", ") + len(entry["operation"]) < NAME_COLUMN_WIDTH - 1


def _supported_on_hopper(calls: Sequence[dispatch.CallSpec]) -> dict[str, list[str]]:
    """The operations that each backend would support on an H100."""
    with machine.assuming(H100):
        choices = [(call.operation, choice) for call in calls for choice in dispatch.explain(call)]
    return {
        backend: list(dict.fromkeys(name for name, choice in choices if choice == dispatch.Choice(backend, None)))
        for backend in ("portable", "hopper")
    }


def _describe_gpu_support(facts: dict[str, Any]) -> str:
    portable, hopper = facts["on_an_h100"]["portable"], facts["on_an_h100"]["hopper"]
    if not portable:
        return "GPU kernels need Triton, which is not installed."
    every = dict.fromkeys(entry["operation"] for entry in facts["operations"])
    without = ", ".join(name for name in every if name not in portable)
    text = "On a GPU, portable kernels (Triton) run every operation" + (f" but {without}" if without else "")
    if hopper:
        text += f"{';' if without else ','} on an H100 or H200, hopper kernels run {', '.join(hopper)}"
    return textwrap.fill(f"{text}.", width=118)


def _choices(call: dispatch.CallSpec) -> dict[str, Any]:
    choices = dispatch.explain(call)
    available = [choice.backend for choice in choices if choice.refusal is None]
    suffix = "" if call.extra_cache_format is None else f" with {call.extra_cache_format}"
    return {
        "operation": call.operation,
        "cache_format": None if call.cache_format is None else call.cache_format + suffix,
        "runs": available[0] if available else None,
        "also": available[1:],
        "refusals": {choice.backend: choice.refusal for choice in choices if choice.refusal is not None},
    }


def _describe_model(config: MLAConfig) -> str:
    query = "no query latent" if config.q_lora_rank is None else f"query latent {config.q_lora_rank}"
    text = (
        f"model: {config.num_attention_heads} heads of {config.qk_nope_head_dim} + {config.qk_rope_head_dim} and "
        f"{config.v_head_dim}, rows of {config.kv_lora_rank} + {config.qk_rope_head_dim}, {query}, softmax scale "
        f"{config.softmax_scale:.5f}"
    )
    if config.indexer is not None:
        indexer = config.indexer
        text += f"\nindexer: {indexer.num_heads} heads of {indexer.head_dim} select {indexer.topk} tokens"
        if indexer.shared_layers:
            text += f", in all but {len(indexer.shared_layers)} layers, which reuse the selection of the layer before"
        text += ". Steps use sparse_decode and sparse_prefill; prefills of fewer tokens use dense_prefill."
    return text


def _describe_v4(layers: Sequence[V4Config]) -> str:
    first, lines = layers[0], []
    for (ratio, indexer), count in Counter((layer.ratio, layer.indexer) for layer in layers).items():
        visible = "only"
        if indexer is not None:
            visible = (
                f"and {indexer.topk} groups of {ratio}, selected by {indexer.num_heads} heads of {indexer.head_dim}"
            )
        elif ratio:
            visible = f"and all groups of {ratio}"
        lines.append(f"    {count} of {len(layers)} layers: a window of {first.window} tokens {visible}")
    return "\n".join(
        (
            f"model: {first.num_attention_heads} heads, rows of {first.head_dim - first.rope_dim} + {first.rope_dim}",
            *lines,
            f"Requests with at least {DEFAULT_LIMITS.min_queries} new tokens use sparse_prefill over a workspace, "
            "others sparse_decode.",
        )
    )


def _describe(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {
            "type": "cpu",
            "name": "CPU",
            "facts": [platform.machine(), f"threads: {torch.get_num_threads()}", "no GPU that torch can use"],
        }
    properties = torch.cuda.get_device_properties(device)
    facts = [
        f"compute capability {properties.major}.{properties.minor}",
        f"{properties.multi_processor_count} SMs",
        f"{properties.total_memory / 2**30:.0f} GiB",
    ]
    return {"type": "cuda", "name": properties.name, "facts": facts}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
