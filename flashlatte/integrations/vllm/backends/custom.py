"""The attention backend CUSTOM: one name that resolves to a class for each kind of layer."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Resolve ``FlashLatteBackend``, which vLLM looks up for each kind of layer that it selects a backend for."""
    if name != "FlashLatteBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flashlatte.integrations.vllm import compat

    if compat.indexer_refusal() is None:
        return ByLayer()
    from flashlatte.integrations.vllm.backends.dense import FlashLatteMLABackend

    return FlashLatteMLABackend


class ByLayer:
    """Proxy for a backend class: validates a configuration with the class for its layers, then forwards to that class.

    A model may have layers with an indexer and others without (Hy4). Before the first validation, attributes are those
    of the dense class.
    """

    def __init__(self) -> None:
        from flashlatte.integrations.vllm.backends.dense import FlashLatteMLABackend

        self.backend: type = FlashLatteMLABackend

    def validate_configuration(self, *, use_sparse: bool, **wanted: Any) -> list[str]:
        """Why the class for these layers does not support the configuration; empty if it does."""
        if use_sparse:
            from flashlatte.integrations.vllm.backends.sparse import FlashLatteSparseMLABackend

            self.backend = FlashLatteSparseMLABackend
        return self.backend.validate_configuration(use_sparse=use_sparse, **wanted)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)
