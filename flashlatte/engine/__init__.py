"""A small inference engine: pages with a prefix cache, a scheduler, a runner.

``Engine`` (engine.py) gets a step from the ``Scheduler`` (scheduler.py, over pages.py), runs it with the ``Runner``
(runner.py) on a ``Model`` (model.py), and returns the tokens. request.py defines what is scheduled, batch.py the inputs
of a step, paged.py what all models share, states.py and linear_attention.py the states of linear attention,
logits_processing.py and sampling.py the choice of tokens. ``AsyncEngine`` (async_engine.py) runs an engine in a thread,
for asyncio.
"""

from typing import TYPE_CHECKING

from flashlatte.runtime import lazy

if TYPE_CHECKING:
    from flashlatte.engine.async_engine import AsyncEngine
    from flashlatte.engine.engine import Engine
    from flashlatte.engine.logprobs import Logprob
    from flashlatte.engine.model import Model
    from flashlatte.engine.outputs import CompletionOutput, RequestOutput
    from flashlatte.engine.sampling_params import SamplingParams

__all__ = ["AsyncEngine", "CompletionOutput", "Engine", "Logprob", "Model", "RequestOutput", "SamplingParams"]

lazy.declare(
    __name__,
    {
        "AsyncEngine": "flashlatte.engine.async_engine:AsyncEngine",
        "CompletionOutput": "flashlatte.engine.outputs:CompletionOutput",
        "Engine": "flashlatte.engine.engine:Engine",
        "Logprob": "flashlatte.engine.logprobs:Logprob",
        "Model": "flashlatte.engine.model:Model",
        "RequestOutput": "flashlatte.engine.outputs:RequestOutput",
        "SamplingParams": "flashlatte.engine.sampling_params:SamplingParams",
    },
)
__getattr__, __dir__ = lazy.attach(__name__)
