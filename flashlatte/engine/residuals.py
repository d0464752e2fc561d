"""The residual stream of a decoder layer, or its several streams (Hy4, GLM-5.3-Flash), around attention and MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flashlatte.engine.paged import normed
from flashlatte.layers.v4.hyper_connection import read_streams
from flashlatte.ops.mhc import mhc_post

Block = Callable[[torch.Tensor], torch.Tensor]


def normed_or_gated(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The norm of x [T, hidden_size]: an RMSNorm, or one that a gate follows (A.X-K2)."""
    return norm(x) if any(True for _ in norm.children()) else normed(norm, x)


class Residual:
    """One stream [T, hidden_size]: x + block(norm(x))."""

    def begin(self, embedded: torch.Tensor) -> torch.Tensor:
        """The streams of embedded tokens [T, hidden_size]."""
        return embedded

    def attention(self, layer: Any, streams: torch.Tensor, block: Block) -> torch.Tensor:
        """The streams after a layer's attention."""
        return streams + block(normed_or_gated(layer.input_layernorm, streams))

    def mlp(self, layer: Any, streams: torch.Tensor, block: Block) -> torch.Tensor:
        """The streams after a layer's MLP."""
        return streams + block(normed_or_gated(layer.post_attention_layernorm, streams))

    def end(self, body: Any, streams: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, hidden_size] of the rows of streams that are given."""
        return normed(body.norm, streams)


class ScaledResidual(Residual):
    """One stream [T, hidden_size], x + layer.residual_scale · block(norm(x)), and a divisor at the end (MiniCPM3).

    Args:
        divisor: divisor of hidden states before the head.
    """

    def __init__(self, divisor: float) -> None:
        self.divisor = divisor

    def attention(self, layer: Any, streams: torch.Tensor, block: Block) -> torch.Tensor:
        return streams + block(normed(layer.input_layernorm, streams)) * layer.residual_scale

    def mlp(self, layer: Any, streams: torch.Tensor, block: Block) -> torch.Tensor:
        return streams + block(normed(layer.post_attention_layernorm, streams)) * layer.residual_scale

    def end(self, body: Any, streams: torch.Tensor) -> torch.Tensor:
        return normed(body.norm, streams) / self.divisor


class ShortcutResidual(Residual):
    """One stream, and the output of the experts that is still to be added: [T, 2, hidden_size] (LongCat-Flash).

    Layers are those of ``Sublayer``.
    """

    def begin(self, embedded: torch.Tensor) -> torch.Tensor:
        return torch.stack((embedded, torch.zeros_like(embedded)), dim=1)

    def attention(self, layer: Any, streams: torch.Tensor, block: Block) -> torch.Tensor:
        x, shortcut = streams.unbind(1)
        return torch.stack((x + block(normed(layer.input_layernorm, x)), shortcut), dim=1)

    def mlp(self, layer: Any, streams: torch.Tensor, block: Block) -> torch.Tensor:
        x, shortcut = streams.unbind(1)
        hidden = normed(layer.post_attention_layernorm, x)
        if layer.shortcut is None:
            return torch.stack((x + block(hidden) + shortcut, torch.zeros_like(x)), dim=1)
        return torch.stack((x + block(hidden), layer.shortcut(hidden[None])[0]), dim=1)

    def end(self, body: Any, streams: torch.Tensor) -> torch.Tensor:
        return normed(body.norm, streams[:, 0])


class IndependentStreams(Residual):
    """Hy4's independent hyper-connections over streams [T, n, hidden_size].

    A layer's ``attn_hc`` and ``ffn_hc`` read the input of a block from the streams, and give the factors [T, n] by
    which its output is added to them. Sums are in float32, as in transformers.

    Args:
        count: number of streams.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def begin(self, embedded: torch.Tensor) -> torch.Tensor:
        return embedded[:, None].repeat(1, self.count, 1)

    def attention(self, layer: Any, streams: torch.Tensor, block: Block) -> torch.Tensor:
        return self._added(layer.attn_hc, layer.input_layernorm, streams, block)

    def mlp(self, layer: Any, streams: torch.Tensor, block: Block) -> torch.Tensor:
        return self._added(layer.ffn_hc, layer.post_attention_layernorm, streams, block)

    def end(self, body: Any, streams: torch.Tensor) -> torch.Tensor:
        return normed(body.norm, body.hc_head(streams[None])[0])

    def _added(self, connection: Any, norm: nn.Module, streams: torch.Tensor, block: Block) -> torch.Tensor:
        factors, hidden = connection(streams[None])
        out = block(normed(norm, hidden[0]))
        return (factors[0].float()[..., None] * out.float()[:, None] + streams.float()).to(streams.dtype)


class MixedStreams(IndependentStreams):
    """DeepSeek-V4's hyper-connections over streams [T, n, hidden_size] (GLM-5.3-Flash).

    ``attn_hc`` and ``ffn_hc`` also give a matrix [T, n, n] by which the streams are mixed.
    """

    def _added(self, connection: Any, norm: nn.Module, streams: torch.Tensor, block: Block) -> torch.Tensor:
        shares, mixture, hidden = read_streams(connection, streams, None)
        return mhc_post(block(normed(norm, hidden)), streams, shares, mixture)


def residual_of(config: Any) -> Residual:
    """The residual streams of a transformers model."""
    if config.model_type == "longcat_flash":
        return ShortcutResidual()
    if config.model_type == "minicpm3":
        return ScaledResidual(config.logits_scaling)
    streams = getattr(config, "hc_mult", None)
    if streams is None:
        return Residual()
    return MixedStreams(streams) if hasattr(config, "hc_sinkhorn_iters") else IndependentStreams(streams)
