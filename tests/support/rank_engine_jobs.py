"""Jobs with an engine over several ranks: rank 0 takes the requests, the others follow."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import fp8_linears
from support.engine_models import chosen_logprobs, greedy, model

from flashlatte.distributed.model.ranks import Ranks
from flashlatte.engine import Engine, SamplingParams
from flashlatte.engine.model import Model
from flashlatte.engine.runner import Runner

SIZES: dict[str, Any] = {"page_size": 4, "num_pages": 64, "max_num_batched_tokens": 32, "max_num_seqs": 4}
# A token whose embedding is NaN in a ``poisoned`` model.
POISON = 41


def create_engine(source: Any, options: dict[str, Any]) -> Engine:
    """An engine for a model family or a checkpoint."""
    settings: dict[str, Any] = SIZES | {"tensor_parallel": dist.get_world_size()} | options
    return Engine(source if isinstance(source, Path) else model(source), **settings)


def generate(source: Any, prompts: list[list[int]], sampling: SamplingParams, **options: Any) -> Any:
    """Rank 0: tokens, log-probabilities and cached tokens of every request, and the statistics. Others: the number of
    elements that they have of each weight matrix of a layer, and of a page.
    """
    engine = create_engine(source, options)
    if not engine.leads:
        engine.follow()
        served: Any = engine.model
        weights = {name: weight.numel() for name, weight in served._body.layers[-1].named_parameters()}
        return weights, engine.runner.caches[0][0].numel()
    with engine:
        first = engine.generate(prompts[:1], sampling)
        outputs = [*first, *engine.generate(prompts[1:], sampling)]
        assert engine.pool.in_use == 0
        return [
            (output.outputs[0].token_ids, chosen_logprobs(output), output.num_cached_tokens) for output in outputs
        ], engine.statistics()


def generate_in_float8(path: Path, prompts: list[list[int]], sampling: SamplingParams, **options: Any) -> Any:
    """``generate`` with a float8 checkpoint whose weights stay float8."""
    with pytest.MonkeyPatch.context() as patched:
        fp8_linears.install(patched)
        fp8_linears.keep_quantized(patched)
        return generate(path, prompts, sampling, **options)


def poisoned(family: str) -> Any:
    """The family's model, whose logits are NaN from the token ``POISON`` on."""
    poisoned_model = copy.deepcopy(model(family))
    with torch.no_grad():
        poisoned_model.get_input_embeddings().weight[POISON] = math.nan
    return poisoned_model


def generate_poisoned(prompts: list[list[int]], sampling: SamplingParams) -> Any:
    """Outputs on rank 0 of an engine with context parallelism and draft tokens, whose model is ``poisoned``."""
    ranks = dist.get_world_size()
    engine = Engine(
        poisoned("DeepseekV3"), **SIZES, num_speculative_tokens=2, tensor_parallel=ranks, context_parallel=ranks
    )
    if not engine.leads:
        return engine.follow()
    with engine:
        return engine.generate(prompts, sampling)


def options_by_rank(options: list[dict[str, Any]], late: int | None = None) -> None:
    """Create engines with different options by rank, that of rank ``late`` while the others wait for it."""
    mine = {"source": "DeepseekV3"} | options[dist.get_rank()]
    if dist.get_rank() == late:
        time.sleep(1.5)
    engine = create_engine(mine.pop("source"), mine)
    if dist.get_world_size() == engine.ranks.size:
        engine.ranks.leave()


def separate_engines_then_a_common_one() -> list[int]:
    """Create an engine in each process separately, and then one over all processes."""
    alone = Engine(model("DeepseekV3"), **SIZES)
    (output,) = alone.generate([[1, 2, 3]], greedy(3))
    together = generate("DeepseekV3", [[1, 2, 3]], greedy(3))
    assert dist.get_rank() != 0 or together[0][0][0] == output.outputs[0].token_ids
    return output.outputs[0].token_ids


def separate_engine_of_a_model_then_a_common_one() -> None:
    """Create an engine on rank 0 only, from a Model, which other ranks cannot share."""
    if dist.get_rank() == 0:
        Engine(Model(model("DeepseekV3")), **SIZES)
    generate("DeepseekV3", [[1, 2, 3]], greedy(3))


def misuse() -> str:
    """Call methods on a rank that only another rank supports."""
    engine = create_engine("DeepseekV3", {})
    wrong = engine.follow if engine.leads else lambda: engine.add([1, 2])
    try:
        wrong()
    except ValueError as error:
        message = str(error)
    else:
        message = "nothing"
    if engine.leads:
        engine.close()
    else:
        engine.follow()
    return message


def fail(rank: int, at_step: int, how: str = "error", **options: Any) -> None:
    """Make one rank fail within a step; it then stays alive, like a hanging process, or is killed."""
    engine = create_engine("DeepseekV3", options)
    steps = 0
    compute = Model.__call__

    def failing(self: Model, *args: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if dist.get_rank() == rank and steps == at_step:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt if how == "interrupt" else ValueError("this rank has no memory left")
        return compute(self, *args)

    Model.__call__ = failing  # type: ignore[method-assign]
    try:
        if engine.leads:
            with engine:
                engine.generate([[1, 2, 3]], greedy(8))
        else:
            engine.follow()
    except KeyboardInterrupt as error:
        raise AssertionError("interrupted") from error
    finally:
        Model.__call__ = compute  # type: ignore[method-assign]


def end_before_the_engine_agrees() -> None:
    """Rank 1 is killed while it creates its caches; rank 0 waits for it in the store."""
    if dist.get_rank() == 1:
        Runner.__init__ = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,misc]
    create_engine("DeepseekV3", {})


def leave() -> None:
    """Rank 0 finishes without closing the engine."""
    engine = create_engine("DeepseekV3", {})
    if engine.leads:
        engine.ranks.leave()
    else:
        engine.follow()


def fail_when_done() -> str | None:
    """Rank 1 fails after the last step, and rank 0, which has all tokens, closes the engine; returns the error."""
    engine = create_engine("DeepseekV3", {})
    assert isinstance(engine.ranks, Ranks)
    if not engine.leads:
        receive, steps = engine.ranks.receive, iter(range(3))

        def failing() -> Any:
            if next(steps, None) is None:
                raise ValueError("this rank has no time left")
            return receive()

        engine.ranks.receive = failing  # type: ignore[method-assign]
        engine.follow()
        return None
    (output,) = engine.generate([[1, 2, 3]], greedy(3))
    assert len(output.outputs[0].token_ids) == 3
    engine.ranks._plans.get_group_store().wait(["flashlatte/failure/1"], timedelta(seconds=20))
    try:
        engine.close()
    except RuntimeError as error:
        engine.close()  # no other rank is left
        return str(error)
    return None


def minimum(numbers: list[int | None]) -> int:
    """``all_reduce_min`` of the ranks' numbers; a rank with None makes another call."""
    ranks, number = Ranks(dist.get_world_size()), numbers[dist.get_rank()]
    if number is not None:
        return ranks.all_reduce_min(number)
    ranks.agree({"num_pages": 9})
    return 0


def fail_when_created(kind: type) -> None:
    """Creation of ``kind``, the model or the caches, fails on rank 1."""
    make = kind.__init__

    def failing(self: Any, *args: Any, **kwargs: Any) -> None:
        if dist.get_rank() == 1:
            raise ValueError("this rank has no memory left")
        make(self, *args, **kwargs)

    kind.__init__ = failing  # type: ignore[misc]
    try:
        create_engine("DeepseekV3", {"num_pages": None})
    finally:
        kind.__init__ = make  # type: ignore[misc]


def more_processes_than_gpus() -> None:
    """Rank 1's GPU is missing; rank 0 would continue with creating the groups."""
    gpus = {"is_available": lambda: True, "device_count": lambda: 1, "set_device": lambda device: None}
    with contextlib.ExitStack() as patched:
        if dist.get_rank() == 1:
            patched.enter_context(mock.patch.dict("os.environ", {"LOCAL_RANK": "1"}))
            for name, answer in gpus.items():
                patched.enter_context(mock.patch.object(torch.cuda, name, answer))
        create_engine("DeepseekV3", {})


class NeverDone:
    """An event that never completes, as on a GPU that waits for another one."""

    def query(self) -> bool:
        return False


def fail_while_a_gpu_waits() -> None:
    """Rank 1 fails while rank 0 waits for its GPU."""
    engine = create_engine("DeepseekV3", {})
    if engine.leads:
        engine.ranks.wait(NeverDone())  # type: ignore[arg-type]
    with engine.ranks.failing_together():
        raise ValueError("this rank has no memory left")
