"""The attention of one long prompt over several GPUs, beside the same on one.

    PYTHONPATH=. torchrun --nproc-per-node 4 benchmarks/distributed_prefill.py [--tokens 131072] [--json FILE]

128 heads of 192 and 128 numbers, latents of 512 + 64, bf16. Both expand latents to keys and values, and that is timed
too; the result is checked against one GPU's. Times are medians of calls in turns, of the slowest rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from ranks import check, in_turns, report

from flashlatte import dense_prefill
from flashlatte.distributed import PrefillRing

LATENT, NOPE, ROPE, V = 512, 128, 64, 128
ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072, help="of the prompt")
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--json", type=Path, help="append a line to this file")
    arguments = parser.parse_args()
    report(lambda: [figures(arguments.tokens, arguments.heads)], arguments.json)


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
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "one": lambda: dense_prefill(q, *expand(rows), ends, ends, tokens, tokens, causal=True)[0],
        "ring": lambda: ring.attend(my_q, my_rows, expand, tokens=tokens)[0],
    }
    wanted = calls["one"]()[here]
    check(calls["ring"](), wanted, "the ring")
    del wanted
    times = in_turns(calls, ROUNDS)
    return {
        "tokens": tokens,
        "heads": heads,
        "one_ms": round(times["one"], 2),
        "ring_ms": round(times["ring"], 2),
        "times one GPU": round(times["one"] / times["ring"], 2),
    }


if __name__ == "__main__":
    main()
