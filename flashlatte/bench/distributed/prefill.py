"""The attention of one long prompt over several GPUs, compared with one GPU.

    torchrun --nproc-per-node 4 -m flashlatte bench distributed-prefill [--tokens 131072] [--json FILE]

128 heads of dimension 192 and 128, latents of 512 + 64, bf16. Both expand latents to keys and values, which is included
in the times; the result is checked against one GPU's. Times are medians of alternating calls, of the slowest rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from flashlatte import dense_prefill
from flashlatte.bench.alternate import add_json_option
from flashlatte.bench.distributed.ranks import alternating_ms, check, report
from flashlatte.distributed import PrefillRing

LATENT, NOPE, ROPE, V = 512, 128, 64, 128
ROUNDS = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens of the prompt (default 131072)")
    parser.add_argument("--heads", type=int, default=128, help="query heads (default 128)")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    return report(lambda: [figures(options.tokens, options.heads)], options.json)


def figures(tokens: int, heads: int) -> dict[str, object]:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    q, rows = draw(tokens, heads, NOPE + ROPE), draw(tokens, LATENT + ROPE)
    up = draw(LATENT, heads * (NOPE + V)) / LATENT**0.5

    def expand(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nope, values = (rows[:, :LATENT] @ up).unflatten(-1, (heads, NOPE + V)).split((NOPE, V), dim=-1)
        keys = rows.new_empty(len(rows), heads, NOPE + ROPE)
        keys[..., :NOPE], keys[..., NOPE:] = nope, rows[:, None, LATENT:]
        return keys, values

    ends = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
    ring = PrefillRing()
    here = ring.positions(tokens, device="cuda")
    my_q, my_rows = q[here], rows[here]
    calls: dict[str, Callable[[], Any]] = {
        "one": lambda: dense_prefill(q, *expand(rows), ends, ends, tokens, tokens, causal=True)[0],
        "ring": lambda: ring.attend(my_q, my_rows, expand, tokens=tokens)[0],
    }
    wanted = calls["one"]()[here]
    check(calls["ring"](), wanted, "the ring")
    del wanted
    times = alternating_ms(calls, ROUNDS)
    return {
        "tokens": tokens,
        "heads": heads,
        "one_ms": round(times["one"], 2),
        "ring_ms": round(times["ring"], 2),
        "times one GPU": round(times["one"] / times["ring"], 2),
    }
