"""The demo's models: small ones with fixed random weights, stored and loaded by transformers' own code."""

from __future__ import annotations

import contextlib
import math
import string
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

_READABLE = frozenset((string.ascii_letters + " ").encode())


class ByteTokenizer:
    """A token is a byte; three special tokens follow."""

    bos_token_id = 256
    eos_token_id = 257
    pad_token_id = 258
    vocabulary = 259
    # A model with random weights generates all bytes with similar probability, and most bytes are not text.
    unreadable = tuple(token for token in range(vocabulary) if token not in _READABLE)

    def encode(self, data: bytes) -> list[int]:
        """Token ids, the first of which is the beginning of a sequence."""
        return [self.bos_token_id, *data]

    def decode(self, ids: list[int]) -> bytes:
        """The bytes of token ids, without the special tokens."""
        return bytes(token for token in ids if token < 256)


LAYERS, HEADS = 3, 8
NOPE, ROPE, VALUE, LATENT = 128, 64, 128, 512

# Chosen so that greedy decoding generates many different tokens, each with a clear margin over the second: attention is
# peaked, and the experts' outputs are small, because rounding may change the choice of an expert.
SEED = 1
# DeepseekV32's indexer, which selects a third of the tokens.
INDEX_HEADS, INDEX_DIM, TOPK = 32, 128, 128
FAMILIES = {"v3": "DeepseekV3", "v3.2": "DeepseekV32", "v4": "DeepseekV4"}
GAINS = {
    "embed_tokens": 1.0,
    "q_b_proj": 4.0,
    "o_proj": 4.0,
    "o_b_proj": 4.0,
    "down_proj": 0.25,
    "_hc.fn": 0.1,
    "lm_head": 2.0,
}
# DeepSeek-V4 normalizes queries after their projection, so the weight of the keys' norm makes attention peaked.
KEY_GAIN = 4.0


def load_model(device: torch.device, name: str = "v3") -> Any:
    """The model of ``FAMILIES`` in float32, after a round trip through safetensors in a temporary directory."""
    import transformers

    with tempfile.TemporaryDirectory() as directory, _quiet_transformers():
        _random_model(name).save_pretrained(directory)
        host: Any = getattr(transformers, f"{FAMILIES[name]}ForCausalLM")
        model: Any = host.from_pretrained(directory, dtype=torch.float32)
    return model.to(device).eval()


def _random_model(name: str) -> Any:
    import transformers

    family = FAMILIES[name]
    config = getattr(transformers, f"{family}Config")(
        **_attention(name),
        vocab_size=ByteTokenizer.vocabulary,
        hidden_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        n_routed_experts=8,
        num_experts_per_tok=2,
        routed_scaling_factor=1.0,
        q_lora_rank=128,
        bos_token_id=ByteTokenizer.bos_token_id,
        # No end-of-sequence token, so that every run generates all tokens.
        eos_token_id=None,
        pad_token_id=ByteTokenizer.pad_token_id,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter, weight in model.named_parameters():
            if weight.dim() < 2:
                if parameter.endswith(("self_attn.kv_norm.weight", "compressor.kv_norm.weight")):
                    weight.fill_(KEY_GAIN)
                continue
            gain = next((gain for part, gain in GAINS.items() if part in parameter), 1.0)
            fan_in = 1 if "embed_tokens" in parameter else weight.shape[-1]
            weight.normal_(0.0, gain / math.sqrt(fan_in), generator=generator)
    return model


def _attention(name: str) -> dict[str, Any]:
    """The config fields in which the families differ."""
    if name == "v4":
        return {
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
            "head_dim": LATENT,
            "o_groups": 2,
            "o_lora_rank": 128,
            "hc_mult": 2,
            "index_n_heads": INDEX_HEADS,
            "index_head_dim": INDEX_DIM,
            # At least as many as the longest text has groups: with random weights every group matters.
            "index_topk": 1024,
        }
    mla = {
        "intermediate_size": 512,
        "first_k_dense_replace": 1,
        "num_key_value_heads": HEADS,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
    }
    if name == "v3":
        return mla
    return mla | {"index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_DIM, "index_topk": TOPK}


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Disable transformers' progress bars, which would interrupt the demo's own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
