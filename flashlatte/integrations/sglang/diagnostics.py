"""``flashlatte doctor`` for SGLang: its version, whether the plugin is registered, and what it replaces for a model.

The hooked functions are looked up in SGLang's sources, without importing SGLang.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashlatte.integrations import decode_precision
from flashlatte.integrations.sglang.hooks import Hook, missing_targets
from flashlatte.layers.config import MLAConfig

GROUP, PLUGIN = "sglang.srt.plugins", "flashlatte"


def diagnose(*layers: MLAConfig, v4: bool = False) -> dict[str, Any]:
    """Versions and choices as plain data.

    Args:
        layers: the kinds of layers of a model; none for DeepSeek-V4.
        v4: whether the model is DeepSeek-V4.
    """
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return {"version": None}
    absent = _unregistered_reason()
    return {
        "version": version,
        "registered": absent is None,
        "reason": absent,
        "missing": missing_targets(_in_sources),
        "served": _served_operations(layers, v4=v4) if layers or v4 else None,
    }


def report(facts: dict[str, Any]) -> list[str]:
    """The facts as lines for a terminal; no lines if SGLang is not installed."""
    if facts["version"] is None:
        return []
    state = "registered" if facts["registered"] else f"not registered: {facts['reason']}"
    lines = [f"SGLang {facts['version']}: FlashLatte's plugin is {state}"]
    lines += [f"    it lacks {target}, which FlashLatte does not replace" for target in facts["missing"]]
    if facts["served"] is not None and facts["registered"]:
        lines.append(f"    {facts['served']}")
    return lines


def _unregistered_reason() -> str | None:
    """Why the plugin is not registered with SGLang, or None. The GPU is not checked."""
    if PLUGIN not in importlib.metadata.entry_points(group=GROUP).names:
        return "flashlatte is not installed as a package here, so SGLang cannot find its plugin"
    allowed = os.environ.get("SGLANG_PLUGINS")
    if allowed and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        return f"SGLANG_PLUGINS is {allowed!r}, without {PLUGIN}"
    return None


def _served_operations(layers: Sequence[MLAConfig], *, v4: bool) -> str:
    if precision := decode_precision.requested():
        if v4 or any(layer.indexer is not None for layer in layers):
            return decode_precision.needs_message(
                "a model without an indexer, which SGLang runs with --attention-backend flashmla"
            )
        return (
            f"with --attention-backend flashmla --kv-cache-dtype fp8_e4m3, which {decode_precision.VARIABLE}="
            f"{precision} needs, FlashLatte runs decode and SGLang runs prefill"
        )
    if v4:
        return "on Hopper FlashLatte runs decode, sparse prefill and the indexer; SGLang runs caches of V4.1"
    if any(layer.attn_sink for layer in layers):
        return (
            "SGLang runs layers with attention sinks with its DSA backend flashmla_sparse only; FlashLatte runs that "
            "backend's decode and prefill, with the sinks, and the indexer"
        )
    if any(layer.indexer is not None for layer in layers):
        return (
            "on Hopper FlashLatte runs decode, prefill and the indexer without further options; FlashAttention runs "
            "prompts shorter than the indexer's top-k"
        )
    return (
        "with --attention-backend flashmla FlashLatte runs decode and SGLang runs prefill; without it SGLang chooses "
        "FlashAttention on Hopper"
    )


def _in_sources(hook: Hook) -> bool:
    """Whether the sources of the installed package define the hook's target. True for a target without a module."""
    package, *modules, name = hook.target.split(".")
    if not modules:
        return True
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    for folder in folders:
        path = Path(folder, *modules).with_suffix(".py")
        # The target is a method: the part before its name is a class in the module.
        path = path if path.exists() else path.parent.with_suffix(".py")
        if path.exists():
            nodes = ast.walk(ast.parse(path.read_text()))
            return any(isinstance(node, ast.FunctionDef) and node.name == name for node in nodes)
    return False
