"""The interface between engine and model: logits of flat batches over paged caches, and the caches."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flashlatte import kv_cache
from flashlatte.distributed.model.single_process import SingleProcess
from flashlatte.engine.batch import EngineLimits, StepBatch
from flashlatte.engine.model_types import refusal
from flashlatte.kv_cache import CacheFormat
from flashlatte.kv_cache.registry import plain_format
from flashlatte.layers.missing_weights import warn_of_missing
from flashlatte.layers.weights import has_custom_forward, has_hooks

# Makes the metadata of a step, with attributes ``num_tokens`` and ``buffers``. With a number, it is padded to so many
# requests, and its tensors keep their addresses until ``buffers`` is another object.
Planner = Callable[[StepBatch, int | None], Any]

# Default size of the cache: a fraction of a GPU's free memory, or a number of tokens on a CPU.
CACHE_SHARE, CPU_TOKENS = 0.8, 16384
# The type of a DeepSeek-V3 under another name. transformers would run the checkpoint's own code for it.
_OF_KIMI_K2 = "kimi_k2"


class PagedModel:
    """A transformers model's properties and caches. Subclasses compute logits.

    Args:
        model: a transformers model.
        device: device of its weights and of the caches.
        ranks: ranks that compute it together.

    Attributes:
        config, vocabulary, max_position, dtype, device: the model's.
        name: its model type.
        eos_token_ids: end-of-sequence tokens of the model's generation config.
        page_size: default number of tokens in a page.
        prefix_overlap: tokens at the end of a shared prefix that are recomputed without being written, because later
            tokens need state of theirs that is not in pages.
        batch_invariant: whether a request's result must not depend on the rest of the batch.
        has_states: whether some layers have states of linear attention, which cannot be rolled back to an earlier
            token.
        has_graphs: whether steps of equally many tokens can be captured as CUDA graphs.
    """

    config: Any
    page_size = 64
    prefix_overlap = 0
    batch_invariant = False
    has_states = False
    has_graphs = True

    def __init__(self, model: Any, device: torch.device, ranks: SingleProcess | None = None) -> None:
        self.ranks, self.device = ranks or SingleProcess(), device
        self.name: str = model.config.model_type
        self.vocabulary: int = model.config.vocab_size
        self.max_position: int = model.config.max_position_embeddings
        self._body, self._head = model.model, model.lm_head
        ends = model.generation_config.eos_token_id
        self.eos_token_ids: tuple[int, ...] = () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)
        self.dtype: torch.dtype = self._body.embed_tokens.weight.dtype

    def layouts(self, cache_format: str, page_size: int) -> list[tuple[CacheFormat, int]]:
        """The format and the number of rows of a page of each cache.

        Raises:
            ValueError: a format or page size that does not fit the model.
        """
        raise NotImplementedError

    def planner(self, cache_format: str, limits: EngineLimits) -> Planner:
        """The function that makes the metadata of steps over caches of ``allocate``."""
        raise NotImplementedError

    def __call__(
        self, tokens: torch.Tensor, caches: list[torch.Tensor], metadata: Any, rows: torch.Tensor
    ) -> torch.Tensor:
        """Logits [n, vocabulary] of the ``rows`` (int64 [n]) of a flat batch of ``tokens`` (int64 [T]).

        ``caches`` are those of ``allocate``, then those of ``allocate_states``.
        """
        raise NotImplementedError

    @property
    def plain_format(self) -> str:
        """The cache format of unquantized rows in the model's dtype."""
        return plain_format(self.dtype).name

    def default_pages(self, cache_format: str, page_size: int, num_state_slots: int = 0) -> int:
        """Default number of pages beside so many slots of states; the same on all ranks."""
        if self.device.type != "cuda":
            return -(-CPU_TOKENS // page_size)
        states = sum(state.nbytes for state in self.allocate_states(1)) * num_state_slots
        return self.ranks.all_reduce_min(max(self._pages_that_fit(cache_format, page_size, self.device, states), 1))

    def allocate(
        self, cache_format: str, num_pages: int, page_size: int, *, on_host: bool = False
    ) -> list[torch.Tensor]:
        """The empty caches of ``layouts``, or their copies on the host, in pinned memory if there is a GPU.

        Raises:
            ValueError: they do not fit the memory; says how many pages do.
        """
        device = torch.device("cpu") if on_host else self.device
        # Computed first, because a failed attempt may leave memory allocated.
        fit = self._pages_that_fit(cache_format, page_size, device)
        try:
            caches = [
                kv_cache.allocate(layout, num_pages, rows, device=device)
                for layout, rows in self.layouts(cache_format, page_size)
            ]
            return [cache.pin_memory() for cache in caches] if device != self.device else caches
        except RuntimeError as error:
            name = "swap_space" if on_host else "num_pages"
            memory = "the host's" if device.type == "cpu" else "the GPU's"
            raise ValueError(
                f"{name} must fit {memory} free memory: of {num_pages} pages of {page_size} tokens about {fit} do"
            ) from error

    def allocate_states(self, num_slots: int, *, on_host: bool = False) -> list[torch.Tensor]:
        """States of linear attention [num_slots, …], zeros, or their copies on the host; none by default.

        Raises:
            ValueError: they do not fit the memory.
        """
        return []

    def _pages_that_fit(self, cache_format: str, page_size: int, device: torch.device, reserved: int = 0) -> int:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
        page_bytes = sum(layout.page_bytes(rows) for layout, rows in self.layouts(cache_format, page_size))
        return max(int(free * CACHE_SHARE) - reserved, 0) // page_bytes


def config_of(model: Any) -> Any:
    """The transformers config of a model, or of a checkpoint directory.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        OSError, ValueError: the directory, or its config.json, is missing or cannot be read; or the model is one that
            neither transformers nor the engine has.
        TypeError: neither a model nor a path.
    """
    if not isinstance(model, (str, Path)):
        if not hasattr(getattr(model, "config", None), "model_type"):
            raise TypeError(f"model must be of transformers, or the directory of a checkpoint, got {model!r}")
        return model.config
    try:
        from transformers import CONFIG_MAPPING, AutoConfig, DeepseekV3Config
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the engine needs transformers: pip install 'flashlatte[transformers]'") from error
    if not Path(model).is_dir():
        raise FileNotFoundError(f"model must be the directory of a checkpoint, got {model}")
    file = Path(model) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"model must be the directory of a checkpoint, and {model} has no config.json")
    fields = _read(model, lambda: json.loads(file.read_bytes()))
    if not isinstance(fields, dict):
        raise ValueError(f"config.json must be a JSON object, and {model} has another, got {type(fields).__name__}")
    if not isinstance(fields.get("model_type"), (str, type(None))):
        raise ValueError(f"model_type in config.json must be a str, and {model} has {fields['model_type']!r}")
    if fields.get("model_type") == _OF_KIMI_K2:
        return _read(model, lambda: DeepseekV3Config.from_dict(fields | {"model_type": DeepseekV3Config.model_type}))
    reason = refusal(str(fields.get("model_type")))
    if fields.get("model_type") not in CONFIG_MAPPING and reason is not None:
        raise ValueError(f"model must be of a type that the engine supports, got {fields['model_type']!r}: {reason}")
    return _read(model, lambda: AutoConfig.from_pretrained(model, local_files_only=True))


def _read(path: str | Path, read: Callable[[], Any]) -> Any:
    """The result of ``read``, which calls transformers. Its errors for invalid files have many types."""
    try:
        return read()
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"config.json must be one that transformers reads, and {path} has another: {reason}"
        ) from error


def check_type(config: Any, known: Sequence[str]) -> None:
    """Raise ValueError for a model of another type, with the reason if there is one."""
    if config.model_type not in known:
        reason = refusal(config.model_type)
        raise ValueError(
            f"model must be of a type that the engine supports ({', '.join(known)}), got {config.model_type!r}"
            + ("" if reason is None else f": {reason}")
        )


def is_linear(config: Any, layer: int) -> bool:
    """Whether a layer of a model is linear attention."""
    return (getattr(config, "layer_types", None) or {layer: None})[layer] == "linear_attention"


def normed(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """A transformers RMSNorm in one kernel instead of seven.

    The result has the dtype of ``x`` and is rounded once, also with float32 weights, which DeepSeek-V4's
    norms keep in a bf16 checkpoint.
    """
    if norm.weight.dtype == x.dtype:
        return nn.functional.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
    return nn.functional.rms_norm(x.float(), x.shape[-1:], norm.weight.float(), norm.variance_epsilon).to(x.dtype)


def check_parts(model: Any) -> None:
    """Raise TypeError for a model without a head, or with hooks or a replaced forward on a module that is not called.

    The engine calls the MLPs, linear attention and projections of decoder layers, and reads the weights of norms
    (``normed``). Warns of weights that were missing in the checkpoint.
    """
    if not (hasattr(model, "lm_head") and hasattr(getattr(model, "model", None), "layers")):
        raise TypeError(
            "model must have decoder layers and a head that gives logits, as transformers' …ForCausalLM, got "
            f"{type(model).__name__}"
        )
    for number, layer in enumerate(model.model.layers):
        called = {"mlp", "mlps", "self_attn"} if is_linear(model.config, number) else {"mlp", "mlps"}
        for name, part in layer.named_modules():
            if name.split(".")[0] in called:
                continue
            # Projections are called, and the forward of a norm may be replaced by a kernel.
            has_forward = has_custom_forward(part) and [*part.children()]
            if has_hooks(part) or has_forward:
                raise TypeError(
                    f"layer {number} of the model must have no hooks and no other forward outside of its MLP, as the "
                    f"engine does not call it: got {'some' if has_hooks(part) else 'another forward'} on "
                    f"{name or 'the layer'}"
                )
    # The hooks of ``flashlatte.integrations.transformers.enable`` prepare a call that the engine does not make.
    own = {hook.id for hook in getattr(model.model, "_flashlatte_hooks", ())}
    parts = {"the model": model, "the decoder": model.model, "the last norm of the model": model.model.norm}
    for name, part in parts.items():
        if has_hooks(part, own):
            raise TypeError(f"{name} must have no hooks, as the engine does not call it: got some")
    warn_of_missing(model.model, model.lm_head)
