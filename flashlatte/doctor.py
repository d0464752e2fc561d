"""``flashlatte doctor``: what this machine is, and for every operation which implementation would run and why."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch

import flashlatte
from flashlatte import dispatch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PACKAGES = ("torch", "triton", "transformers")


def examine(dtype: str = "bf16") -> dict[str, Any]:
    """Versions, device and choices as plain data; ``dtype`` is that of the queries ("bf16", "fp16" or "fp32")."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return {
        "versions": {
            "flashlatte": flashlatte.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
        "device": _describe(device),
        "dtype": dtype,
        "operations": [_choices(call) for call in typical_calls(device, DTYPES[dtype])],
    }


def typical_calls(device: torch.device, dtype: torch.dtype) -> list[dispatch.Call]:
    """One call of every operation and cache format, in DeepSeek-V3's (for ``model1``, V4's) shape."""
    plain = next(name for name, known in DTYPES.items() if known == dtype)
    attention: dict[str, Any] = {"page_size": 64, "head_dim_v": 512, "h_q": 128, "h_kv": 1}
    calls = [
        dispatch.Call("dense_decode", device, dtype, cache_format=name, head_dim=576, **attention)
        for name in (plain, "fp8")
    ]
    calls += [
        dispatch.Call("sparse_decode", device, dtype, cache_format=name, head_dim=head_dim, **attention)
        for name, head_dim in (("v32", 576), ("model1", 512), (plain, 576))
    ]
    calls.append(dispatch.Call("sparse_prefill", device, dtype, head_dim=576, head_dim_v=512, h_q=128, h_kv=1))
    calls.append(dispatch.Call("merge_states", device, dtype, head_dim_v=512))
    for operation in ("kv_cache.write", "kv_cache.gather"):
        for name, head_dim in ((plain, 576), ("fp8", 576), ("v32", 576), ("model1", 512)):
            calls.append(dispatch.Call(operation, device, dtype, cache_format=name, page_size=64, head_dim=head_dim))
    known = {call.operation for call in calls}
    calls += [dispatch.Call(name, device, dtype) for name in dispatch.operations() if name not in known]
    return calls


def report(facts: dict[str, Any]) -> str:
    """The facts as text for a terminal."""
    device = facts["device"]
    lines = ["  ".join(f"{name} {version or 'not installed'}" for name, version in facts["versions"].items())]
    lines.append(", ".join([device["name"], *device["facts"]]))
    lines.append("")
    for operation in facts["operations"]:
        what = operation["operation"] + (f" over {operation['cache_format']}" if operation["cache_format"] else "")
        lines.append(f"{what:<28}{operation['runs'] or 'nothing can run it here'}")
        lines += [f"    not {name}: it {reason}" for name, reason in operation["refusals"].items()]
    return "\n".join(lines)


def _choices(call: dispatch.Call) -> dict[str, Any]:
    choices = dispatch.explain(call)
    able = [choice.backend for choice in choices if choice.refusal is None]
    return {
        "operation": call.operation,
        "cache_format": call.cache_format,
        "runs": able[0] if able else None,
        "also": able[1:],
        "refusals": {choice.backend: choice.refusal for choice in choices if choice.refusal is not None},
    }


def _describe(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {
            "type": "cpu",
            "name": "CPU",
            "facts": [platform.machine(), f"{torch.get_num_threads()} threads", "no GPU that torch can use"],
        }
    properties = torch.cuda.get_device_properties(device)
    facts = [
        f"compute capability {properties.major}.{properties.minor}",
        f"{properties.multi_processor_count} multiprocessors",
        f"{properties.total_memory / 2**30:.0f} GiB",
    ]
    return {"type": "cuda", "name": properties.name, "facts": facts}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
