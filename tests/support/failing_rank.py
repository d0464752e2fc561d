"""A program that runs an engine on WORLD_SIZE processes, one of which fails within a step.

Arguments: the rank that fails, its step, the number of context-parallel ranks, 1 for CUDA graphs.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from support.engine_models import greedy, model, prompt

from flashlatte.engine import Engine
from flashlatte.engine.runner import Runner


def main(rank: int, at_step: int, context_parallel: int, graphs: int) -> None:
    engine = Engine(
        model().to("cuda", torch.bfloat16) if torch.cuda.is_available() else model(),
        num_pages=16,
        tensor_parallel=int(os.environ["WORLD_SIZE"]),
        context_parallel=context_parallel,
        cuda_graphs=bool(graphs),
    )
    compute, steps = Runner._compute, 0

    def failing(runner: Runner, batch: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == at_step and int(os.environ["RANK"]) == rank:
            raise ValueError("this rank has no memory left")
        return compute(runner, batch)

    Runner._compute = failing  # type: ignore[method-assign]
    if engine.leads:
        with engine:
            engine.generate([prompt(70), prompt(3, 1)], greedy(40))
    else:
        engine.follow()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
