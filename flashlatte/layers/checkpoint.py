"""Loads the weights of an MLA layer from a checkpoint: checks, dequantizes and slices them to a shard's heads."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flashlatte.layers.config import MLAConfig
from flashlatte.layers.quantized import apply_block_scales

BLOCK = 128
_SCALE = "_scale_inv"
_INDEX = "model.safetensors.index.json"


def read_layer(path: str | Path, layer: int, module: str = "self_attn") -> dict[str, torch.Tensor]:
    """Read the tensors of a layer's ``module``, keyed by their names below it, to the CPU.

    Raises:
        FileNotFoundError: no safetensors file.
        ModuleNotFoundError: safetensors is not installed.
        ValueError: a damaged file, or no file with the layer.
    """
    marker = f"layers.{layer}.{module}."
    found = {}
    for file in _files(Path(path), marker):
        with open_safetensors(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                prefix, _, rest = name.partition(marker)
                if rest and (not prefix or prefix.endswith(".")):
                    found[rest] = tensors.get_tensor(name)
    if not found:
        raise ValueError(f"path must hold weights of layer {layer} ({marker}…), found none in {path}")
    return found


def _files(path: Path, marker: str) -> list[Path]:
    """The safetensors files that may contain the layer."""
    if path.is_file():
        return [path]
    index = path / _INDEX
    if index.is_file():
        return sorted({path / file for name, file in files_by_weight(index).items() if marker in name})
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"path must be a safetensors file or a directory with some, got {path}")
    return files


def safetensors_files(path: Path) -> list[Path]:
    """The safetensors files that transformers would load from a directory; empty if it would load other files."""
    whole, index = path / "model.safetensors", path / _INDEX
    if whole.is_file():
        return [whole]
    return sorted({path / file for file in files_by_weight(index).values()}) if index.is_file() else []


def open_safetensors(file: Path) -> Any:
    """Open a safetensors file without reading its tensors.

    Raises:
        FileNotFoundError, ModuleNotFoundError: the file, or safetensors, is missing.
        ValueError: a damaged file, for example from an interrupted download.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("this needs safetensors: pip install 'flashlatte[transformers]'") from error
    if not file.is_file():
        raise FileNotFoundError(f"the checkpoint's file {file} is missing")
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} must be a complete safetensors file: {error}") from error


def files_by_weight(index: Path) -> dict[str, str]:
    """The file of each weight, from a checkpoint's index.

    Raises:
        ValueError: the index is not JSON, or has no ``weight_map``.
    """
    try:
        files = json.loads(index.read_text()).get("weight_map")
    except json.JSONDecodeError as error:
        raise ValueError(f"{index} must be JSON: {error}") from error
    if not isinstance(files, dict):
        raise ValueError(f"{index.name} must have a weight_map object, got {files!r} in {index.parent}")
    return files


def load_weights(
    module: nn.Module,
    config: MLAConfig,
    heads: tuple[int, int],
    weights: Mapping[str, torch.Tensor],
    ignore: Sequence[str] = (),
) -> None:
    """Copy a whole layer's weights into a module with some of its heads; see ``MLAAttention.load_weights``."""
    targets = dict(module.named_parameters())
    missing = [name for name in targets if name not in weights]
    if missing:
        raise ValueError(f"weights must have {', '.join(missing)}, got {', '.join(sorted(weights)) or 'nothing'}")
    _refuse_unused(weights, set(targets), config, ignore)
    wrong, ready = [], {}
    for name, target in targets.items():
        weight, axis = weights[name], _HEAD_AXES.get(name)
        shape = list(target.shape)
        if axis is not None:
            shape[axis] = shape[axis] // (heads[1] - heads[0]) * config.num_attention_heads
        if list(weight.shape) != shape:
            wrong.append(f"{name} must have shape {shape}, got {list(weight.shape)}")
            continue
        scale = weights.get(name + _SCALE)
        if weight.dtype.itemsize == 1:
            blocks = [-(-size // BLOCK) for size in shape]
            if scale is None or list(scale.shape) != blocks:
                got = "none" if scale is None else str(list(scale.shape))
                wrong.append(f"{name} is {weight.dtype} and must have {name + _SCALE} of shape {blocks}, got {got}")
                continue
            weight = apply_block_scales(weight, scale, (BLOCK, BLOCK))
        if axis is not None:
            size_per_head = shape[axis] // config.num_attention_heads
            weight = weight.narrow(axis, heads[0] * size_per_head, target.shape[axis])
        ready[name] = weight
    if wrong:
        raise ValueError("weights do not fit the layer: " + "; ".join(wrong))
    with torch.no_grad():
        for name, weight in ready.items():
            targets[name].copy_(weight)


def _refuse_unused(
    weights: Mapping[str, torch.Tensor], names: set[str], config: MLAConfig, ignore: Sequence[str]
) -> None:
    """Raise ValueError for unknown weights: skipping them silently could skip a part of the model, such as an
    indexer."""
    # Only the first shard has o_proj.bias, but every shard receives it.
    used = names | ({"o_proj.bias"} if config.attention_bias else set())
    used |= {name + _SCALE for name in names if name in weights and weights[name].dtype.itemsize == 1}
    unused = [name for name in weights if name not in used]
    unused = sorted(name for name in unused if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore))
    if unused:
        raise ValueError(
            f"weights must not have {', '.join(unused)}, which the layer does not use: pass ignore= to skip them"
        )


# The axis of each weight that concatenates the heads.
_HEAD_AXES = {
    "q_proj.weight": 0,
    "q_b_proj.weight": 0,
    "q_gate_proj.weight": 0,
    "kv_b_proj.weight": 0,
    "g_proj.weight": 0,
    "gate_proj.weight": 0,
    "sinks": 0,
    "o_proj.weight": 1,
}
