"""Loading of checkpoint directories: a transformers model without missing weights, and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flashlatte.distributed.model.weight_names import in_transformers
from flashlatte.engine.paged import config_of
from flashlatte.engine.text_part import MULTIMODAL
from flashlatte.layers.checkpoint import open_safetensors, safetensors_files
from flashlatte.layers.missing_weights import check_loaded, check_stored


def load(path: str | Path, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Any:
    """The transformers model of a checkpoint directory, in evaluation mode.

    Raises:
        OSError: a file is missing.
        ValueError: transformers cannot load the checkpoint, as with a damaged file; the model has weights
            that the checkpoint lacks, or the checkpoint has some of another shape, or biases and scales that the model
            does not have.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = config_of(path)
    auto = AutoModelForImageTextToText if config.model_type in MULTIMODAL else AutoModelForCausalLM
    dtypes = {
        in_transformers(name, config.model_type): file.get_slice(name).get_dtype()
        for file in map(open_safetensors, safetensors_files(Path(path)))
        for name in file.keys()  # noqa: SIM118 (safe_open is no mapping)
    }
    check_stored(path, config, dtypes)
    try:
        loaded: Any = auto.from_pretrained(
            path,
            config=config,
            dtype=dtype or "auto",
            local_files_only=True,
            output_loading_info=True,
            # ``check_loaded`` refuses them by name.
            ignore_mismatched_sizes=True,
        )
    except (torch.OutOfMemoryError, OSError):
        raise
    except Exception as error:  # of many types: damaged files, unknown or incomplete quantization, missing packages
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"model must be a checkpoint that transformers can load, and {path} is not: {reason}"
        ) from error
    model, info = loaded
    check_loaded(path, model, info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"])
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()


def tokenizer_of(model: Any) -> Any:
    """The tokenizer of a checkpoint directory with a tokenizer.json; None for a model, or a directory without one.

    Raises:
        ValueError: transformers cannot load it.
    """
    if isinstance(model, (str, Path)) and (Path(model) / "tokenizer.json").is_file():
        return load_tokenizer(model)
    return None


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a checkpoint directory.

    Raises:
        ValueError: transformers cannot load it.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # of many types: transformers tries several tokenizers
        reason = " ".join(str(error).split())
        raise ValueError(
            f"model must be a directory with a tokenizer, and transformers loads none from {path}: {reason}"
        ) from error
