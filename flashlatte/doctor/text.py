"""The facts of ``flashlatte doctor`` as text."""

from __future__ import annotations

import itertools
import textwrap
from typing import Any

from flashlatte.distributed import diagnostics as ranks
from flashlatte.integrations.sglang import diagnostics as sglang
from flashlatte.integrations.vllm import diagnostics as vllm

# Width of the column of operation names.
NAME_COLUMN_WIDTH = 84


def report(facts: dict[str, Any], *, every_reason: bool = False) -> str:
    """The facts as text: one screen, or with ``every_reason`` the reason for each implementation that does not run."""
    device = facts["device"]
    lines = ["  ".join(f"{name} {version or 'not installed'}" for name, version in facts["versions"].items())]
    lines += [", ".join([device["name"], *device["facts"]]), ranks.report(facts["ranks"])]
    if facts["model"] is not None:
        lines.append(facts["model"])
    lines += vllm.report(facts["vllm"])
    lines += sglang.report(facts["sglang"])
    lines.append("")
    on_gpu = device["type"] != "cpu"
    # Without a GPU, the reason is the same for all operations.
    shows_reasons = every_reason or on_gpu
    for layers, group in itertools.groupby(facts["operations"], key=lambda entry: entry["layers"]):
        if layers is not None:
            lines.append(f"{layers}:")
        entries = list(group)
        for entry in entries if every_reason else _merge_entries(entries, by_reasons=on_gpu):
            lines.append(f"{_label(entry):<{NAME_COLUMN_WIDTH}}{entry['runs'] or 'not supported here'}")
            if shows_reasons:
                reasons = entry["refusals"] if every_reason else _reasons(entry)
                lines += [f"    not {name}: it {reason}" for name, reason in reasons.items()]
    if facts["compiled"] is not None:
        lines += ["", facts["compiled"]]
    if not every_reason:
        lines += ["", *([] if on_gpu else [_describe_gpu_support(facts)])]
        lines.append("flashlatte doctor --all gives the reason for every implementation that does not run.")
    return "\n".join(lines)


def _label(entry: dict[str, Any]) -> str:
    sink = " with attn_sink" if entry["attn_sink"] else ""
    return entry["operation"] + sink + (f" over {entry['cache_format']}" if entry["cache_format"] else "")


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
    if before["attn_sink"] or entry["attn_sink"]:
        return False
    if by_reasons and _reasons(before) != _reasons(entry):
        return False
    return len(before["operation"]) + len(", ") + len(entry["operation"]) < NAME_COLUMN_WIDTH - 1


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
