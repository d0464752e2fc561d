"""Transformers models that the engine serves, and their checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

# Models whose decoder layers are norm, MLA, norm, MLP, each pair with a residual, and nothing else.
MODEL_TYPES = (
    "axk1",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_k2",
    "youtu",
)


def load(path: str | Path, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Any:
    """The transformers model of a checkpoint directory, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto", local_files_only=True)
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()


def config_of(model: Any) -> Any:
    """The transformers config of a model, or of a checkpoint directory."""
    if not isinstance(model, (str, Path)):
        return model.config
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the engine needs transformers: pip install 'flashlatte[transformers]'") from error
    if not Path(model).is_dir():
        raise FileNotFoundError(f"model must be the directory of a checkpoint, got {model}")
    return AutoConfig.from_pretrained(model, local_files_only=True)


def check_type(config: Any, known: Sequence[str]) -> None:
    if config.model_type not in known:
        raise ValueError(
            f"model must be of a type that the engine knows ({', '.join(known)}), got {config.model_type!r}"
        )
