"""DeepSeek-V4.1's attention in float64, from a checkpoint's config and weights, for one whole request.

transformers has no such model. The code follows vLLM 0.33 (vllm/models/deepseek_v41), and does not use flashlatte.
"""

from __future__ import annotations

import math

import torch


def random_weights(fields, seed, std=0.3):
    """A checkpoint's tensors of each layer, float32, by their names below ``layers.N.attn.``."""
    draw = torch.Generator().manual_seed(seed)

    def matrix(*shape):
        return std * torch.randn(*shape, generator=draw)

    hidden, rank, heads, dim = (
        fields[name] for name in ("hidden_size", "q_lora_rank", "num_attention_heads", "head_dim")
    )
    groups, out_rank = fields["o_groups"], fields["o_lora_rank"]
    index_heads, index_dim = fields["index_n_heads"], fields["index_head_dim"]
    layers = []
    for layer, ratio in enumerate(fields["compress_ratios"][: fields["num_hidden_layers"]]):
        stores = layer in fields["kv_source_layer_ids"]
        shapes = {
            "wq_a.weight": (rank, hidden),
            "q_norm.weight": (rank,),
            "wq_b.weight": (heads * dim, rank),
            "wkv.weight": (dim, hidden),
            "kv_norm.weight": (dim,),
            "wo_a.weight": (groups * out_rank, heads * dim // groups),
            "wo_b.weight": (hidden, groups * out_rank),
            "attn_sink": (heads,),
        }
        if stores:
            shapes |= {"compressor.wkv.weight": (dim, hidden), "compressor.norm.weight": (dim,)}
        if stores and ratio == 2:
            shapes |= {"compressor.wgate.weight": (dim, hidden)}
        if layer in fields["index_source_layer_ids"]:
            shapes |= {
                "indexer.wq_b.weight": (index_heads * index_dim, rank),
                "indexer.weights_proj.weight": (index_heads, hidden),
            }
            if stores:
                shapes |= {"indexer.wk.weight": (index_dim, dim), "indexer.k_norm.weight": (index_dim,)}
        layers.append({name: matrix(*shape) + ("norm" in name) for name, shape in shapes.items()})
    return layers


def outputs(fields, weights, hidden, stored=lambda rows, cache: rows):
    """Each layer's output [n, hidden_size] for its own hidden states [n, hidden_size].

    ``stored`` gives the rows that a cache, "window" or "groups", returns for rows that are written to it.
    """
    groups, selections, blocks, found = {}, {}, {}, []
    for layer, (tensors, states) in enumerate(zip(weights, hidden, strict=True)):
        one = _Layer(fields, layer, tensors, states.double())
        if one.ratio and layer in fields["kv_source_layer_ids"]:
            groups[layer] = one.groups()
        if one.ratio and layer in fields["index_source_layer_ids"]:
            keys = groups[_last(fields["kv_source_layer_ids"], layer)][1]
            scores = one.scores(keys)
            source = fields.get("candidate_source_layer_id", -1)
            if layer == source:
                blocks = one.best_blocks(scores)
            elif 0 <= source < layer:
                scores = one.within(scores, blocks)
            selections[layer] = one.best(scores)
        rows, chosen = None, None
        if one.ratio:
            rows = stored(groups[_last(fields["kv_source_layer_ids"], layer)][0], "groups")
            chosen = selections[_last(fields["index_source_layer_ids"], layer)]
        found.append(one.attend(stored(one.keys(), "window"), rows, chosen))
    return found


def _last(sources, layer):
    return max(source for source in sources if source <= layer)


class _Layer:
    def __init__(self, fields, layer, tensors, states):
        self.fields, self.states = fields, states
        self.weights = {name: tensor.double() for name, tensor in tensors.items()}
        self.ratio = fields["compress_ratios"][layer]
        self.count = states.shape[0]
        self.visible = [(token + 1) // self.ratio if self.ratio else 0 for token in range(self.count)]
        self.latent = self._norm(self._linear("wq_a", states), "q_norm")

    def _linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, x, name):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.fields["rms_norm_eps"])
        return x * scale * self.weights[f"{name}.weight"]

    def _rotate(self, x, positions, inverse=False):
        """x [n, ..., d] with its last rope dims as pairs (2i, 2i + 1), rotated by ``positions`` [n]."""
        rope_dim = self.fields["qk_rope_head_dim"]
        angles = positions.double()[:, None] * _frequencies(self.fields, rope_dim, self.ratio > 0)
        angles = angles.view(len(positions), *[1] * (x.dim() - 2), rope_dim // 2)
        turned = torch.view_as_complex(x[..., -rope_dim:].unflatten(-1, (-1, 2)).contiguous())
        turned = turned * torch.polar(torch.ones_like(angles), -angles if inverse else angles)
        return torch.cat((x[..., :-rope_dim], torch.view_as_real(turned).flatten(-2)), dim=-1)

    def keys(self):
        return self._rotate(self._norm(self._linear("wkv", self.states), "kv_norm"), torch.arange(self.count))

    def groups(self):
        """Rows of the groups, and their index keys if the layer has an indexer."""
        count = self.count // self.ratio
        kv = self._linear("compressor.wkv", self.states)[: count * self.ratio].unflatten(0, (count, self.ratio))
        if self.ratio > 1:
            gate = self._linear("compressor.wgate", self.states)[: count * self.ratio].unflatten(0, (count, self.ratio))
            kv = kv * gate.softmax(dim=1)
        latents = self._norm(kv.sum(dim=1), "compressor.norm")
        first = torch.arange(count) * self.ratio
        keys = None
        if "indexer.wk.weight" in self.weights:
            keys = self._rotate(self._norm(self._linear("indexer.wk", latents), "indexer.k_norm"), first)
        return self._rotate(latents, first), keys

    def scores(self, keys):
        """[n, groups], -inf for groups that are not visible to a token."""
        heads, dim = self.fields["index_n_heads"], self.fields["index_head_dim"]
        q = self._rotate(self._linear("indexer.wq_b", self.latent).unflatten(1, (heads, dim)), torch.arange(self.count))
        weights = self._linear("indexer.weights_proj", self.states) / math.sqrt(heads * dim)
        scores = torch.einsum("nh,nhg->ng", weights, torch.einsum("nhd,gd->nhg", q, keys).relu())
        hidden = torch.arange(scores.shape[1]) >= torch.tensor(self.visible)[:, None]
        return scores.masked_fill(hidden, -math.inf)

    def best(self, scores):
        """The groups that each token selects."""
        chosen = []
        for row in scores:
            order = row.sort(descending=True, stable=True).indices[: self.fields["index_topk"]]
            chosen.append(order[row[order] > -math.inf])
        return chosen

    def best_blocks(self, scores):
        """The candidate blocks of each token: those of the best groups, and that of the newest group."""
        size, limit, chosen = self.fields["candidate_block_size"], self.fields["candidate_topk_blocks"], []
        for row, visible in zip(scores, self.visible, strict=True):
            best = [row[start : min(start + size, visible)].max().item() for start in range(0, visible, size)]
            if best:
                best[-1] = math.inf
            chosen.append(sorted(range(len(best)), key=lambda block: (-best[block], block))[:limit])
        return chosen

    def within(self, scores, blocks):
        size = self.fields["candidate_block_size"]
        scores = scores.clone()
        for row, chosen in zip(scores, blocks, strict=True):
            kept = {group for block in chosen for group in range(block * size, (block + 1) * size)}
            for group in range(len(row)):
                if group not in kept:
                    row[group] = -math.inf
        return scores

    def attend(self, window, groups, chosen):
        heads, dim = self.fields["num_attention_heads"], self.fields["head_dim"]
        q = self._rotate(self._linear("wq_b", self.latent).unflatten(1, (heads, dim)), torch.arange(self.count))
        rows = []
        for token in range(self.count):
            keys = window[max(token + 1 - self.fields["sliding_window"], 0) : token + 1]
            if groups is not None:
                keys = torch.cat((keys, groups[chosen[token]]))
            logits = q[token] @ keys.T / math.sqrt(dim)
            with_sink = torch.cat((logits, self.weights["attn_sink"][:, None]), dim=1)
            rows.append(with_sink.softmax(dim=1)[:, :-1] @ keys)
        out = self._rotate(torch.stack(rows), torch.arange(self.count), inverse=True)
        by_group = out.reshape(self.count, self.fields["o_groups"], -1)
        matrix = self.weights["wo_a.weight"].unflatten(0, (self.fields["o_groups"], -1))
        return self._linear("wo_b", torch.einsum("ngd,grd->ngr", by_group, matrix).flatten(1))


def _frequencies(fields, rope_dim, compressed):
    """theta^(-2i / rope_dim); with YaRN in layers with groups."""
    theta = fields["compress_rope_theta" if compressed else "rope_theta"]
    powers = theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float64) / rope_dim)
    yarn = fields.get("rope_scaling")
    if not compressed or yarn is None:
        return 1 / powers

    def dim_of(rotations):
        length = yarn["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return rope_dim * math.log(length) / (2 * math.log(theta))

    low = max(math.floor(dim_of(yarn["beta_fast"])), 0)
    high = min(math.ceil(dim_of(yarn["beta_slow"])), rope_dim - 1)
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    return ramp / (yarn["factor"] * powers) + (1 - ramp) / powers
