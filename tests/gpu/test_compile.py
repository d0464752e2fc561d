"""After ``flashlatte compile``, the layer's steps compile nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

CONFIG = {
    "model_type": "deepseek_v32",
    "hidden_size": 256,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "q_lora_rank": 1536,
    "max_position_embeddings": 8192,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
STEPS = """
import json, sys
from triton import knobs
from flashlatte.layers import MLAConfig
from flashlatte.layers.warmup import warmup_steps
import torch

missed = []
knobs.compilation.listener = lambda src, cache_hit, **_: cache_hit or missed.append(src.name)
config = MLAConfig.from_transformers(json.load(open(sys.argv[1])))
for _ in warmup_steps(config, cache_format=sys.argv[2], max_batch=64, device="cuda"):
    pass
torch.cuda.synchronize()
# This one asks whether a GPU takes clusters.
assert [name for name in missed if name != "_nothing"] == [], missed
"""


@pytest.mark.gpu
@pytest.mark.parametrize("cache_format", ["bf16", "v32"])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v32"])
def test_steps_compile_nothing_more(model_type, cache_format, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"model_type": model_type}))
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    options = ["--model", str(path), "--cache-format", cache_format, "--max-batch", "64"]
    for command in (["-m", "flashlatte", "compile", *options], ["-c", STEPS, str(path), cache_format]):
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
