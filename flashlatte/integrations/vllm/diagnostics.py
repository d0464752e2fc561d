"""``flashlatte doctor`` for vLLM: its version, whether the plugin is registered, and the backend of a model."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

import torch

from flashlatte.integrations import decode_precision, vllm
from flashlatte.integrations.vllm import compat, support
from flashlatte.layers.config import MLAConfig

GROUP, PLUGIN = "vllm.general_plugins", "flashlatte"


def diagnose(dtype: torch.dtype, *layers: MLAConfig, v4: bool = False, model_type: str | None = None) -> dict[str, Any]:
    """Versions and choices as plain data. vLLM is imported only if ``layers`` are given.

    Args:
        layers: the kinds of layers of a model; none for DeepSeek-V4.
        v4: whether the model is DeepSeek-V4.
        model_type: ``model_type`` of the model's configuration.
    """
    absent = _unregistered_reason()
    facts: dict[str, Any] = {
        "version": compat.version(),
        "registered": absent is None,
        "reason": absent,
        "mode": vllm.mode(),
    }
    if facts["version"] is None:
        return facts
    if v4:
        facts |= {"option": f"--attention-backend CUSTOM: {support.V4_PARTS}", "chosen": None}
        facts["refusal"] = _v4_refusal(model_type)
    elif model_type in support.WITHOUT_MLA:
        facts |= {"refusal": support.WITHOUT_MLA[model_type], "chosen": None}
    elif layers:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        # vLLM chooses one backend for all layers of a model; an indexer restricts the choice most.
        model = next((layer for layer in layers if layer.indexer is not None), layers[0])
        facts["option"] = _vllm_option(device_type, model)
        refusals = (_refusal(device_type, dtype, layer) for layer in layers)
        facts["refusal"] = next((refusal for refusal in refusals if refusal is not None), None)
        facts["chosen"] = _chosen(dtype, model) if compat.version_refusal() is None else None
    return facts


def report(facts: dict[str, Any]) -> list[str]:
    """The facts as lines for a terminal; no lines if vLLM is not installed."""
    if facts["version"] is None:
        return []
    state = "registered" if facts["registered"] else f"not registered: {facts['reason']}"
    lines = [f"vLLM {facts['version']}: FlashLatte's plugin is {state}"]
    if "chosen" not in facts:
        return lines
    if facts["refusal"] is not None:
        lines.append(f"    not supported by FlashLatte: {facts['refusal']}")
    elif facts["registered"]:
        lines.append(f"    FlashLatte supports this model with {facts['option']}")
    if facts["chosen"] is not None:
        lines.append(f"    without an option vLLM chooses {facts['chosen']}")
    return lines


def _unregistered_reason() -> str | None:
    """Why FlashLatte's backends are not registered with vLLM, or None."""
    if reason := compat.version_refusal():
        return reason
    if PLUGIN not in importlib.metadata.entry_points(group=GROUP).names:
        return "flashlatte is not installed as a package here, so vLLM cannot find its plugin"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        return f"VLLM_PLUGINS is {allowed!r}, without {PLUGIN}"
    return None


def _vllm_option(device_type: str, model: MLAConfig) -> str:
    precision = decode_precision.requested()
    if precision is not None:
        on_cpu = f"{vllm.ON_CPU}=1 and " if device_type == "cpu" else ""
        needs = f"which {decode_precision.VARIABLE}={precision} needs"
        return f"{on_cpu}--attention-backend CUSTOM --kv-cache-dtype fp8, {needs}"
    if device_type == "cpu":
        return f"{vllm.ON_CPU}=1"
    return "--attention-backend CUSTOM" + (", or FLASHLATTE_VLLM=auto" if model.indexer is None else "")


def _refusal(device_type: str, dtype: torch.dtype, model: MLAConfig) -> str | None:
    if device_type == "cpu" and (reason := compat.cpu_refusal()):
        return reason
    if model.window is not None:
        return support.WINDOW_UNSUPPORTED
    if model.indexer is None:
        precision = decode_precision.requested()
        if precision is not None and model.attn_sink:
            return decode_precision.needs_message(support.PRECISION_NEEDS_NO_SINKS)
        return support.dense_refusal(device_type, model.head_dim, dtype, "fp8" if precision else "auto", None)
    return compat.indexer_refusal() or support.sparse_refusal(device_type, model.head_dim, dtype, "auto", None)


def _v4_refusal(model_type: str | None) -> str | None:
    if model_type == "deepseek_v41":
        return support.V41_UNSUPPORTED
    if decode_precision.requested() is not None:
        return decode_precision.needs_message(support.PRECISION_NEEDS)
    if (reason := compat.v4_refusal()) or not torch.cuda.is_available():
        return reason or support.V4_NEEDS_CUDA
    return None if torch.cuda.get_device_capability() >= compat.E4M3_CAPABILITY else support.V4_NEEDS_E4M3


def _chosen(dtype: torch.dtype, model: MLAConfig) -> str:
    """The class that vLLM chooses for a model without an option, or the error it raises."""
    try:
        return compat.automatic_choice(model.head_dim, dtype, model.num_attention_heads, model.indexer is not None)
    except Exception as error:  # Any error from vLLM is part of the report.
        return f"nothing: {type(error).__name__}: {error}"
