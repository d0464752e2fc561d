"""The RMSNorms of a layer's query latent and keys, in one launch."""

from flashlatte.ops.q_kv_norm.api import q_kv_norm

__all__ = ["q_kv_norm"]
