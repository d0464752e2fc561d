"""The transformers model of a checkpoint directory, none of whose weights is missing."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from flashlatte.distributed.model.names import in_transformers
from flashlatte.engine.paged import config_of
from flashlatte.layers.checkpoint import opened, safetensors_files
from flashlatte.layers.missing import check_complete, check_loaded


def load(path: str | Path, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Any:
    """The transformers model of a checkpoint directory, in evaluation mode.

    Raises:
        OSError: a file is missing.
        ValueError: a file is damaged; the model has weights that the checkpoint lacks, or the checkpoint has some of
            another shape, or biases and scales that the model does not have.
    """
    from transformers import AutoModelForCausalLM

    config = config_of(path)
    _check_files(path, config)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype or "auto",
            local_files_only=True,
            output_loading_info=True,
            # Refused below, by name.
            ignore_mismatched_sizes=True,
        )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ValueError(
            f"model must be a checkpoint that transformers can load, and {path} is not: {error}"
        ) from error
    model, info = loaded
    check_loaded(path, model, info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"])
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()


def _check_files(path: str | Path, config: Any) -> None:
    """Raise ValueError for weights whose absence transformers does not report by name, or at all."""
    dtypes = {
        in_transformers(name, config.model_type): file.get_slice(name).get_dtype()
        for file in map(opened, safetensors_files(Path(path)))
        for name in file.keys()  # noqa: SIM118 (safe_open is no mapping)
    }
    missing = set(_missing_experts(dtypes))
    quantization = getattr(config, "quantization_config", None) or {}
    quantization = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    if quantization.get("quant_method") == "fp8":
        missing.update(_missing_scales(dtypes))
    check_complete(path, missing)


def _missing_experts(names: Mapping[str, str]) -> Iterator[str]:
    """Weights that some experts of a layer have and others, up to the last, do not: experts become one tensor."""
    experts: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for name in names:
        if (found := re.match(r"(.*\.experts\.)(\d+)\.(.+)", name)) is not None:
            experts[found[1]].add((int(found[2]), found[3]))
    for before, those in experts.items():
        parts, count = {part for _, part in those}, max(number for number, _ in those) + 1
        for number in range(count):
            yield from (f"{before}{number}.{part}" for part in sorted(parts) if (number, part) not in those)


def _missing_scales(dtypes: Mapping[str, str]) -> Iterator[str]:
    """Scales of float8 weights, which would be taken for the weights themselves."""
    scaled = {name.partition("_scale")[0] for name in dtypes if "_scale" in name}
    for name, dtype in dtypes.items():
        if dtype == "F8_E4M3" and "_scale" not in name and name not in scaled:
            yield f"{name}_scale_inv"
