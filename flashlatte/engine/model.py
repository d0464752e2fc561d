"""A transformers model on flat batches: its embedding, norms, MLPs and head, and this library's attention."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from flashlatte import kv_cache
from flashlatte.engine.checkpoint import Slices
from flashlatte.engine.planner import MLAPlanner, Planner
from flashlatte.engine.ranks import Ranks
from flashlatte.engine.shards import divide_mlp, own_heads
from flashlatte.kv_cache.index_formats import index_format_beside
from flashlatte.kv_cache.registry import format_of_rows
from flashlatte.layers import MLAAttention, MLAConfig, MLAMetadata, MLAMetadataBuilder

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


class AnyModel(Protocol):
    """What an engine asks of a model; methods as ``Model``'s.

    Attributes:
        config, name, vocabulary, max_position, dtype, device: of the model.
        ranks, keys_over: that compute it together, and that its keys are divided over.
        page_size: of its caches, where nobody chose one.
        moves_pages: whether a page holds all that later steps need of its tokens: such pages may be shared and swapped,
            and tokens may be taken back.
    """

    config: Any
    name: str
    vocabulary: int
    max_position: int
    dtype: torch.dtype
    device: torch.device
    ranks: Ranks | None
    page_size: int
    moves_pages: bool

    @property
    def keys_over(self) -> int: ...

    def page_bytes(self, cache_format: str, page_size: int) -> int: ...

    def planner(
        self, cache_format: str, num_pages: int, page_size: int, *, max_requests: int, max_tokens: int, max_seq_len: int
    ) -> Planner: ...

    def allocate(
        self, cache_format: str, num_pages: int, page_size: int, *, pinned: bool = False
    ) -> list[torch.Tensor]: ...

    def __call__(
        self, tokens: torch.Tensor, caches: list[torch.Tensor], metadata: Any, rows: torch.Tensor
    ) -> torch.Tensor: ...


class Model:
    """An MLA model that computes the logits of a flat batch over paged caches.

    Its weights are those of the transformers model, not copies of them. ``attention`` are its layers' attentions.
    Of several ranks each has some of the heads and of every MLP's inner numbers (of a transformers model a copy of
    them), and all of the rest.

    Args:
        model: a transformers model of one of ``MODEL_TYPES``, or the directory of its checkpoint.
        dtype, device: of a checkpoint's weights; by default as stored, and a GPU if there is one (that of the rank).
        backend: of the decode operation; None chooses.
        batch_invariant: of every attention layer, see ``MLAAttention``; not over several ranks.
        ranks: that compute it together; None: this process alone.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        OSError: no checkpoint can be read there.
        ValueError: a model of another type.
    """

    page_size = 64
    moves_pages = True

    def __init__(
        self,
        model: Any,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        backend: str | None = None,
        batch_invariant: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        if batch_invariant and ranks is not None:
            raise ValueError("batch_invariant needs a model on one device: sums over ranks do not promise it")
        of_checkpoint, slices = isinstance(model, (str, Path)), None
        if of_checkpoint:
            if ranks is not None:
                check_type(config := model_config(model), MODEL_TYPES)
                slices = Slices.of(model, config, dtype)
            # What is divided goes to a GPU in parts: the whole may be larger than one.
            model = slices.model if slices else load(model, dtype, device if ranks is None else "cpu")
        check_type(model.config, MODEL_TYPES)
        if ranks is not None and not of_checkpoint:
            model = copy.deepcopy(model)
        self.ranks = ranks
        self.config = MLAConfig.from_transformers(model.config)
        self.name = f"{model.config.model_type}:{getattr(model.config, '_name_or_path', '')}"
        self.vocabulary: int = model.config.vocab_size
        self.max_position = self.config.rope.max_position
        self._body, self._head = model.model, model.lm_head
        self.attention = [
            self._adopt(number, layer, backend, batch_invariant) for number, layer in enumerate(self._body.layers)
        ]
        if slices is not None and ranks is not None:
            slices.fill(ranks, self.config.num_attention_heads, device or ranks.device)
        elif ranks is not None and of_checkpoint:
            model.to(device or ranks.device)
        weight = self.attention[0].kv_b_proj.weight
        self.dtype, self.device = weight.dtype, weight.device

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def keys_over(self) -> int:
        """Ranks that a request's keys are divided over."""
        return 1 if self.ranks is None else self.ranks.keys_over

    @property
    def topk(self) -> int | None:
        """Tokens that a query attends to at most; None: all."""
        return None if self.config.indexer is None else self.config.indexer.topk

    def formats(self, cache_format: str) -> list[kv_cache.CacheFormat]:
        """The formats of the model's caches: every layer's latents, then index keys of each layer with an indexer."""
        layout = format_of_rows(cache_format, self.config.kv_lora_rank, self.config.qk_rope_head_dim)
        indexer = self.config.indexer
        if indexer is None:
            return [layout] * self.num_layers
        if layout.takes_scale:
            raise ValueError(f"cache_format {cache_format!r} cannot be read token by token, as an indexer needs it")
        keys = kv_cache.get_format(index_format_beside(layout), indexer.head_dim)
        return [layout] * self.num_layers + [keys for layer in self.attention if layer.indexer is not None]

    def page_bytes(self, cache_format: str, page_size: int) -> int:
        """Bytes of a page in all caches together."""
        return sum(layout.page_bytes(page_size) for layout in self.formats(cache_format))

    def planner(
        self, cache_format: str, num_pages: int, page_size: int, *, max_requests: int, max_tokens: int, max_seq_len: int
    ) -> MLAPlanner:
        """What makes the metadata of steps over caches of ``allocate``; page_size is that of all ranks together."""
        builder = MLAMetadataBuilder(
            page_size,
            max_requests,
            max(max_tokens, max_requests),
            max_seq_len,
            self.device,
            cache_format=cache_format,
            num_pages=num_pages,
            topk=self.topk,
        )
        return MLAPlanner(builder)

    def allocate(
        self, cache_format: str, num_pages: int, page_size: int, *, pinned: bool = False
    ) -> list[torch.Tensor]:
        """The empty caches of ``formats``, on the model's device, or ``pinned`` on the host (if there is a GPU)."""
        device = torch.device("cpu") if pinned else self.device
        caches = [
            kv_cache.allocate(layout, num_pages, page_size, device=device) for layout in self.formats(cache_format)
        ]
        return [cache.pin_memory() for cache in caches] if pinned and self.device.type == "cuda" else caches

    @torch.inference_mode()
    def __call__(
        self, tokens: torch.Tensor, caches: list[torch.Tensor], metadata: MLAMetadata, rows: torch.Tensor
    ) -> torch.Tensor:
        """Logits [n, vocabulary] of the ``rows`` (int64 [n]) of a flat batch of ``tokens`` (int64 [T])."""
        hidden = self._body.embed_tokens(tokens)
        index_caches = iter(caches[self.num_layers :])
        latents = caches[: self.num_layers]
        for layer, attention, cache in zip(self._body.layers, self.attention, latents, strict=True):
            index_cache = None if attention.indexer is None else next(index_caches)
            attended = attention(layer.input_layernorm(hidden), cache, metadata, index_cache=index_cache)
            hidden = hidden + (attended if self.ranks is None else self.ranks.sum(attended))
            # Mixtures of experts take [batch, tokens, hidden].
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden)[None])[0]
        return self._head(self._body.norm(hidden[rows]))

    def _adopt(self, number: int, layer: Any, backend: str | None, batch_invariant: bool) -> MLAAttention:
        """An attention layer on the weights of a decoder layer's module, or with this rank's part of them."""
        shares = self.config.indexer is not None and number in self.config.indexer.shared_layers
        module = layer.self_attn
        if self.ranks is not None:
            divide_mlp(layer.mlp, self.ranks)
            # In the module's place, so that the whole one can be forgotten.
            layer.self_attn = own_heads(self.config, module, self.ranks, backend=backend, shares_selection=shares)
            return layer.self_attn
        attention = MLAAttention(
            self.config, backend=backend, batch_invariant=batch_invariant, shares_selection=shares, device="meta"
        )
        attention.load_state_dict(module.state_dict(), assign=True)
        return attention.requires_grad_(False)


def load(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    known: Sequence[str] = MODEL_TYPES,
) -> Any:
    """The transformers model of a checkpoint directory, in evaluation mode, if it is of a ``known`` type."""
    check_type(model_config(path), known)
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto", local_files_only=True)
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()


def model_config(path: str | Path) -> Any:
    """The transformers config of a checkpoint directory."""
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the engine needs transformers: pip install 'flashlatte[transformers]'") from error
    if not Path(path).is_dir():
        raise FileNotFoundError(f"model must be the directory of a checkpoint, got {path}")
    return AutoConfig.from_pretrained(path, local_files_only=True)


def check_type(config: Any, known: Sequence[str]) -> None:
    if config.model_type not in known:
        raise ValueError(
            f"model must be of a type that the engine knows ({', '.join(known)}), got {config.model_type!r}"
        )
