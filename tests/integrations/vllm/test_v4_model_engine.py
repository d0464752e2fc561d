"""A whole DeepSeek-V4 in vLLM's engine on a CPU: CUDA layers with FlashLatte's attention and selection."""

import json
import os
import subprocess
import sys

import pytest
from support import tiny_checkpoints, tiny_v4, vllm_v4_model
from support.vllm_engine import Generated, largest_difference, prompts

# Tolerance of a logprob: caches are e4m3 and activations bfloat16; transformers uses float32.
CLOSE = 0.15


def served(folder, **changes):
    """Runs in its own process: Triton's interpreter is enabled before vLLM is imported."""
    model, out = tiny_v4.write(folder / "model", **changes), folder / "out.json"
    command = [sys.executable, "-m", "support.vllm_v4_model", str(model), str(out)]
    subprocess.run(command, check=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    return model, json.loads(out.read_text())


def share_selection(model):
    """Let transformers' last layer reuse the selection of layer 1, as with ``index_topk_freq`` 2."""
    layers = tiny_checkpoints._load(model).model.layers
    first, last = (layers[layer].self_attn.compressor.indexer for layer in (1, 3))
    chosen = []
    first.register_forward_hook(lambda module, given, selected: chosen.append(selected))
    last.register_forward_hook(lambda module, given, selected: chosen[-1])


# All of up to 77 groups, for which vLLM runs no indexer, and fewer. The first 32 groups would differ by 0.54.
@pytest.mark.parametrize(
    ("changes", "chooses"),
    [({"index_topk": 512}, False), ({"index_topk": 32}, True), ({"index_topk": 32, "index_topk_freq": 2}, True)],
)
def test_generates_the_tokens_of_transformers(tmp_path, changes, chooses):
    """Chunked prefill across groups of 4 and of 128 tokens, and a page from the prefix cache."""
    model, results = served(tmp_path, **changes)
    if "index_topk_freq" in changes:
        share_selection(model)
    calls = {name: count > 0 for name, count in results["calls"].items()}
    attends = dict.fromkeys(("sparse_decode", "sparse_prefill"), True)
    assert calls == attends | dict.fromkeys(("paged_index_select", "index_select"), chooses)
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
