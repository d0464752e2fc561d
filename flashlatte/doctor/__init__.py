"""``flashlatte doctor``: versions, device, and the implementation that each operation would use, with reasons."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import flashlatte
from flashlatte import ops
from flashlatte.bench.environment import package_version
from flashlatte.distributed import diagnostics as ranks
from flashlatte.doctor.calls import DTYPES, takes_sink, typical_calls, v4_calls, v41_calls
from flashlatte.doctor.models import read_fields, read_model
from flashlatte.doctor.text import report
from flashlatte.integrations.sglang import diagnostics as sglang
from flashlatte.integrations.vllm import diagnostics as vllm
from flashlatte.runtime import dispatch, machine

__all__ = ["DTYPES", "diagnose", "read_fields", "report", "typical_calls"]

PACKAGES = ("triton", "transformers")
H100 = machine.GPU((9, 0), 132)


def diagnose(dtype: str = "bf16", model: str | Path | None = None) -> dict[str, Any]:
    """Collect versions, device and dispatch choices.

    Args:
        dtype: dtype of the queries: "bf16", "fp16" or "fp32".
        model: a model's ``config.json``, or its directory; DeepSeek-V3's shape if None. If layers differ in their
            attention, each kind has operations of its own.

    Raises:
        OSError, ValueError: an unreadable file, or one that is not an MLA model's config.
    """
    ops.load()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    found = None if model is None else read_model(read_fields(model))
    queries = DTYPES[dtype]
    configs = [] if found is None else [kind.config for kind in found.kinds]
    v4 = found is not None and found.is_v4
    # Label of the layers, whether they have attention sinks, and their calls.
    groups: list[tuple[str | None, bool, list[dispatch.CallSpec]]]
    if found is None:
        groups = [(None, False, typical_calls(device, queries))]
    elif found.v41_layers:
        groups = [(None, True, v41_calls(device, queries, found.v41_layers))]
    elif found.v4_layers:
        groups = [(None, True, v4_calls(device, queries, found.v4_layers))]
    else:
        groups = [
            (kind.label, kind.config.attn_sink, typical_calls(device, queries, kind.config)) for kind in found.kinds
        ]
    calls = [call for _, _, group in groups for call in group]
    model_type = None if found is None else found.model_type
    return {
        "versions": {
            "flashlatte": flashlatte.__version__,
            "python": platform.python_version(),
            # Unlike the package's metadata, it includes the build (+cpu, +cu130).
            "torch": str(torch.__version__),
            **{name: package_version(name) for name in PACKAGES},
        },
        "device": _describe(device),
        "ranks": ranks.diagnose(),
        "dtype": dtype,
        "model": None if found is None else found.description,
        "operations": [_choices(call, layers, sink=sink) for layers, sink, group in groups for call in group],
        "on_an_h100": _supported_on_hopper(calls) if device.type == "cpu" else None,
        "vllm": vllm.diagnose(queries, *configs, v4=v4, model_type=model_type),
        "sglang": sglang.diagnose(*configs, v4=v4),
        "compiled": _compiled(model, dtype) if model and torch.cuda.is_available() and dtype != "fp32" else None,
    }


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


def _supported_on_hopper(calls: Sequence[dispatch.CallSpec]) -> dict[str, list[str]]:
    """The operations that each backend would support on an H100."""
    with machine.assuming(H100):
        choices = [(call.operation, choice) for call in calls for choice in dispatch.explain(call)]
    return {
        backend: list(dict.fromkeys(name for name, choice in choices if choice == dispatch.Choice(backend, None)))
        for backend in ("portable", "hopper")
    }


def _choices(call: dispatch.CallSpec, layers: str | None, *, sink: bool) -> dict[str, Any]:
    choices = dispatch.explain(call)
    available = [choice.backend for choice in choices if choice.refusal is None]
    suffix = "" if call.extra_cache_format is None else f" with {call.extra_cache_format}"
    return {
        "operation": call.operation,
        "layers": layers,
        "attn_sink": sink and takes_sink(call.operation),
        "cache_format": None if call.cache_format is None else call.cache_format + suffix,
        "runs": available[0] if available else None,
        "also": available[1:],
        "refusals": {choice.backend: choice.refusal for choice in choices if choice.refusal is not None},
    }


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
