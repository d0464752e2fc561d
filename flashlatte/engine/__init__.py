"""A serving engine small enough to read: pages with a prefix cache, a scheduler, a runner.

From the top: ``Engine`` (engine.py) asks the ``Scheduler`` (scheduler.py, over pages.py) for a step, lets the
``Runner`` (runner.py) execute it on a ``Model`` (model.py), and hands out the tokens. request.py has what the scheduler
plans with, batch.py the same in numbers, paged.py what every model has in common.
"""

from typing import TYPE_CHECKING

from flashlatte.runtime import lazy

if TYPE_CHECKING:
    from flashlatte.engine.engine import Engine
    from flashlatte.engine.model import Model
    from flashlatte.engine.outputs import Output
    from flashlatte.engine.sampling import SamplingParams

__all__ = ["Engine", "Model", "Output", "SamplingParams"]

lazy.declare(
    __name__,
    {
        "Engine": "flashlatte.engine.engine:Engine",
        "Model": "flashlatte.engine.model:Model",
        "Output": "flashlatte.engine.outputs:Output",
        "SamplingParams": "flashlatte.engine.sampling:SamplingParams",
    },
)
__getattr__, __dir__ = lazy.attach(__name__)
