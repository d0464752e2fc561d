"""Options of the commands that start an engine, and that engine. Importing this does not import torch."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from flashlatte.engine.engine import Engine

# vLLM's names.
DTYPES = ("auto", "bfloat16", "float16", "float32")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint's directory, and the options of its model."""
    parser.add_argument("model", type=Path, help="directory of a checkpoint and its tokenizer")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="dtype of the weights; auto (default) is the stored dtype"
    )
    parser.add_argument("--device", help="cuda, cuda:N or cpu; default: a GPU if there is one")
    parser.add_argument("--cache-format", help="format of the KV cache; default: the model's dtype")
    parser.add_argument(
        "--context-parallel", type=int, default=1, help="ranks that share the keys, with torchrun (default 1)"
    )


def create_engine(arguments: argparse.Namespace, **options: Any) -> Engine:
    """The engine of a command's arguments, on as many ranks as torchrun started.

    Args:
        options: further arguments of ``Engine``.

    Raises:
        OSError, TypeError, ValueError: as ``Engine``; a device that does not exist.
    """
    import torch

    from flashlatte.engine.engine import Engine
    from flashlatte.engine.model_factory import create_model

    ranks = {"tensor_parallel": int(os.environ.get("WORLD_SIZE", "1")), "context_parallel": arguments.context_parallel}
    model = create_model(
        arguments.model,
        options={"cache_format": arguments.cache_format},
        dtype=None if arguments.dtype == "auto" else getattr(torch, arguments.dtype),
        device=_device(arguments.device),
        **ranks,
    )
    return Engine(model, cache_format=arguments.cache_format, **ranks, **options)


def _device(name: str | None) -> torch.device | None:
    import torch

    if name is None:
        return None
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device must be cuda, cuda:N or cpu, got {name!r}") from None
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"--device must be cuda, cuda:N or cpu, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--device must be a device of this machine, which has {torch.cuda.device_count()} GPUs, got {name!r}"
        )
    return device
