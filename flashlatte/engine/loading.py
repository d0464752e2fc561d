"""Loading of checkpoint directories: a transformers model without missing weights, on one or several ranks, and its
tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashlatte.distributed.model.checkpoint import Slices
from flashlatte.distributed.model.partition import check_divisible
from flashlatte.distributed.model.ranks import Ranks
from flashlatte.distributed.model.shards import copy_sharing_weights, move_weights
from flashlatte.distributed.model.weight_names import in_transformers
from flashlatte.engine.paged import check_parts, config_of
from flashlatte.engine.text_part import MULTIMODAL, text_part
from flashlatte.layers.checkpoint import open_safetensors, safetensors_files
from flashlatte.layers.missing_weights import check_loaded, check_stored


@dataclass(frozen=True)
class OpenedModel:
    """A transformers model, which ranks may divide before they load or move its weights.

    Attributes:
        model: the model, or the language model of a multimodal one.
        slices: the checkpoint of which each rank reads its part; None if the weights are loaded.
        is_copy: whether it is a copy that still shares the weights of a caller's model.
    """

    model: Any
    slices: Slices | None
    is_copy: bool

    def place(self, ranks: Ranks, heads: int, device: torch.device) -> None:
        """Load this rank's part of the weights, or move it to its device; ``heads`` as in ``Slices.fill``."""
        if self.slices is not None:
            self.slices.fill(ranks, heads, device)
        else:
            # Every process may have created the model on the first GPU.
            move_weights(self.model, device, copies=self.is_copy)


def open_model(
    model: Any,
    config: Any,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    ranks: Ranks | None,
) -> OpenedModel:
    """Load a checkpoint directory, or check a loaded model; several ranks only prepare it (``OpenedModel.place``).

    Args:
        config: the config of the language model.
        dtype, device: for a checkpoint's weights.

    Raises:
        OSError, TypeError, ValueError: as ``load``, ``check_parts`` and ``check_divisible``; a dtype or device for a
            loaded model on one device.
    """
    of_checkpoint, slices = isinstance(model, (str, Path)), None
    if of_checkpoint:
        slices = None if ranks is None else Slices.of(model, config, dtype, device or ranks.device)
        # Each rank copies its shard to its GPU, because the whole model may not fit on one.
        model = slices.model if slices else load(model, dtype, device if ranks is None else "cpu")
    else:
        for name, value in (("dtype", dtype), ("device", device if ranks is None else None)):
            if value is not None:
                raise ValueError(f"{name} must be None for a model that is loaded, which has one, got {value}")
    model = text_part(model)
    check_parts(model)
    if ranks is not None:
        check_divisible(model)
        model = model if of_checkpoint else copy_sharing_weights(model)
    return OpenedModel(model, slices, not of_checkpoint)


def load(path: str | Path, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Any:
    """The transformers model of a checkpoint directory, in evaluation mode.

    Raises:
        OSError: a file is missing.
        ValueError: transformers cannot load the checkpoint, for example because a file is damaged; the model has
            weights that the checkpoint lacks, or the checkpoint has some of another shape, or biases and scales that
            the model does not have.
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
