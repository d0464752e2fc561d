"""A whole DeepSeek-V4 in vLLM's engine on a CPU: the attention of its layers for CUDA, with FlashLatte's functions."""

import json
import os
import subprocess
import sys

import pytest
from support import tiny_checkpoints, tiny_v4, vllm_v4_model
from support.vllm_engine import Generated, largest_difference, prompts

# Of a logprob: caches are e4m3 and activations bfloat16, and transformers' float32.
CLOSE = 0.15


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A process of its own: Triton's interpreter is chosen before vLLM is imported."""
    folder = tmp_path_factory.mktemp("v4")
    model, out = tiny_v4.write(folder / "model"), folder / "out.json"
    command = [sys.executable, "-m", "support.vllm_v4_model", str(model), str(out)]
    subprocess.run(command, check=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    return model, json.loads(out.read_text())


def test_generates_what_transformers_does(served):
    """In chunks, across groups of 4 and of 128 tokens, and from a page that vLLM kept."""
    model, results = served
    assert min(results["calls"].values()) > 0
    ours = [
        Generated(
            one["tokens"], [{int(token): p for token, p in step.items()} for step in one["logprobs"]], one["cached"]
        )
        for one in results["generated"]
    ]
    assert [one.cached for one in ours] == [0, 0, 0, vllm_v4_model.PAGE]
    given = prompts(vllm_v4_model.LENGTHS)
    given.append(given[-1][: vllm_v4_model.AGAIN])
    theirs = [Generated(*tiny_checkpoints.greedy(model, ids, vllm_v4_model.NEW_TOKENS)) for ids in given]
    assert [one.tokens for one in ours] == [other.tokens for other in theirs]
    assert 0 < largest_difference(ours, theirs) < CLOSE
