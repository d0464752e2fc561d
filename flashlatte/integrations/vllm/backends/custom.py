"""The attention backend CUSTOM: one name that resolves to a class for each kind of model."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Resolve ``FlashLatteBackend`` to the backend class for the model that vLLM is loading."""
    if name != "FlashLatteBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none

    from flashlatte.integrations.vllm import compat, support

    config = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    if model is not None and model.architecture in support.INDEXER_MODELS and compat.indexer_refusal() is None:
        from flashlatte.integrations.vllm.backends.sparse import FlashLatteSparseMLABackend

        return FlashLatteSparseMLABackend
    from flashlatte.integrations.vllm.backends.dense import FlashLatteMLABackend

    return FlashLatteMLABackend
