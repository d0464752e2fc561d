"""``flashlatte compile`` for a GPU that is not present."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
from support.model_fields import V3_FIELDS

from flashlatte import cli
from flashlatte.precompile import command

CONFIG = V3_FIELDS

V4_CONFIG = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 3,
    "hidden_size": 256,
    "q_lora_rank": 64,
    "num_attention_heads": 16,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_groups": 4,
    "o_lora_rank": 64,
    "sliding_window": 128,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 64,
    "compress_ratios": [0, 4, 128],
    "max_position_embeddings": 2048,
}


@pytest.fixture
def compile_ahead(tmp_path):
    """Runs the command in a process that assumes a GPU, with an empty Triton cache."""

    def run(*arguments, config=CONFIG):
        (tmp_path / "config.json").write_text(json.dumps(config))
        command = [sys.executable, "-m", "flashlatte", "compile", "--model", str(tmp_path), "--json", *arguments]
        environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.full
def test_each_kernel_is_listed_once(compile_ahead):
    found = compile_ahead("--target", "sm_80", "--max-batch", "3", "--list")
    assert found["target"] == "sm_80"
    assert found["missing"] == found["kernels"]
    # Lengths and positions at any offset in a buffer need no additional variants.
    once = {"latent_rows_kernel", "rotate_heads_kernel", "forward_kernel", "gather_rows_kernel", "merge_kernel"}
    counts = Counter(found["kernels"])
    assert {name: counts[name] for name in once} == dict.fromkeys(once, 1)
    assert counts["dense_decode_kernel"] >= 1


@pytest.mark.full
def test_kernels_of_deepseek_v4(compile_ahead):
    found = compile_ahead("--target", "sm_90", "--max-batch", "3", "--list", config=V4_CONFIG)
    counts = Counter(found["kernels"])
    # One for windows alone and those of groups; for each of two ratios and the indexer's keys.
    assert counts["compress_sum_kernel"] == 3
    once = ("q_kv_norm_kernel", "rotate_and_cache_kernel", "gather_tiles_kernel", "sparse_prefill_kernel")
    once += ("mhc_pre_kernel", "mhc_post_kernel")
    assert {name: counts[name] for name in once} == dict.fromkeys(once, 1)
    for name in ("sparse_decode_kernel", "index_workspace_kernel", "index_logits_paged_kernel", "topk_kernel"):
        assert counts[name] >= 1
    # With a plain cache other kernels gather, and the indexer's products are in bf16.
    plain = Counter(
        compile_ahead("--target", "sm_90", "--max-batch", "3", "--list", "--cache-format", "bf16", config=V4_CONFIG)[
            "kernels"
        ]
    )
    assert plain["gather_tiles_kernel"] == 0
    assert plain["gather_rows_kernel"] == 1


@pytest.mark.full
def test_kernels_of_deepseek_v41(compile_ahead):
    layers = {"compress_ratios": [0, 2, 1, 1, 1], "kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2, 4]}
    candidates = {"candidate_source_layer_id": 2, "candidate_topk_blocks": 8, "candidate_block_size": 32}
    config = V4_CONFIG | layers | candidates | {"model_type": "deepseek_v41", "num_hidden_layers": 5}
    found = compile_ahead("--target", "sm_90", "--max-batch", "3", "--list", config=config)
    counts = Counter(found["kernels"])
    # Latents of groups of 2 and of 1, and index keys.
    assert counts["compress_sum_kernel"] == 3
    # Rows of the window, and of groups in both formats.
    assert counts["rotate_and_cache_kernel"] == 1
    assert counts["write_blocks_kernel"] == 2
    for name in ("sparse_decode_kernel", "index_logits_paged_kernel", "sparse_prefill_kernel", "topk_kernel"):
        assert counts[name] >= 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "cache_format"), [(CONFIG | {"qk_rope_head_dim": 0}, "v32_no_rope"), (V4_CONFIG, "v41")]
)
def test_kernels_of_formats_of_the_same_width(compile_ahead, config, cache_format):
    options = ("--target", "sm_90", "--max-batch", "1", "--list", "--cache-format", cache_format)
    assert Counter(compile_ahead(*options, config=config)["kernels"])["sparse_decode_kernel"] >= 1


@pytest.mark.full
def test_kernels_of_an_indexer_cover_short_and_long_prefills(compile_ahead):
    indexer = {"model_type": "deepseek_v32", "index_n_heads": 32, "index_head_dim": 128, "index_topk": 1024}
    options = ("--target", "sm_90", "--sms", "114", "--max-batch", "1", "--list")
    counts = Counter(compile_ahead(*options, config=CONFIG | indexer)["kernels"])
    # One kernel for single tokens, one for groups, and one that repeats groups with nonfinite values token by token;
    # each also for vLLM's queries, which are in two tensors.
    assert (counts["sparse_prefill_kernel"], counts["union_kernel"]) == (6, 1)


DOTS3 = CONFIG | {
    "model_type": "dots3_note",
    "num_hidden_layers": 3,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 64,
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
    "sliding_window": 512,
    "per_layer_config": {"1": {"num_attention_heads": 32}},
}


def test_every_kind_of_layer_runs_its_steps(monkeypatch):
    seen = []
    monkeypatch.setattr(command, "warmup_steps", lambda config, **options: seen.append((config, options)) or iter("s"))
    steps = command._mla_steps(DOTS3, 4)
    assert list(steps(cache_format="bf16")) == ["s", "s"]
    assert [(config.window, config.num_attention_heads, options["heads"]) for config, options in seen] == [
        (None, 16, 4),
        (512, 32, 8),
    ]


@pytest.mark.full
def test_kernels_of_layers_that_differ(compile_ahead):
    options = ("--target", "sm_90", "--max-batch", "1", "--list")
    counts = Counter(compile_ahead(*options, config=DOTS3)["kernels"])
    # 16 heads with an indexer and 32 with a window.
    assert counts["sparse_decode_kernel"] >= 2
    assert counts["topk_kernel"] >= 1


@pytest.mark.full
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("cache_format", ["bf16", "v32"])
def test_compiled_kernels_are_found_in_the_cache(compile_ahead, target, cache_format):
    options = ("--target", target, "--max-batch", "2", "--cache-format", cache_format)
    compiled = compile_ahead(*options, "--jobs", "2")
    assert compiled["errors"] == {}
    assert compiled["missing"] == []
    assert compile_ahead(*options, "--list") == compiled


def test_ranks_of_deepseek_v4(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(V4_CONFIG))
    arguments = ["compile", "--model", str(tmp_path), "--target", "sm_90", "--tensor-parallel", "8"]
    assert cli.main(arguments) == cli.USER_ERROR
    assert "--tensor-parallel must divide the model's 4 groups of heads, got 8" in capsys.readouterr().err


def test_deepseek_v4_refuses_decode_in_e4m3(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(V4_CONFIG))
    arguments = ["compile", "--model", str(tmp_path), "--target", "sm_90", "--decode-precision", "fp8"]
    assert cli.main(arguments) == cli.USER_ERROR
    assert "--decode-precision belongs to dense MLA layers, got a deepseek_v4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "H100"], "--target must be one of sm_80, .*, got 'H100'"),
        (["--target", "sm_90", "--cache-format", "fp9"], "--cache-format must be one of bf16, .*, got 'fp9'"),
        (["--target", "sm_90", "--tensor-parallel", "3"], "--tensor-parallel must divide the model's 16 heads, got 3"),
        (["--target", "sm_90", "--max-batch", "0"], "--max-batch must be from 1 to 65536, got 0"),
        (["--target", "sm_90", "--max-batch", "99999999999"], "--max-batch must be from 1 to 65536, got 99999999999"),
        (["--target", "sm_90", "--max-queries", "257"], "--max-queries must be from 1 to 256, got 257"),
        (["--target", "sm_90", "--sms", "-1"], "--sms must be at least 1, got -1"),
        (["--target", "sm_90", "--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--target", "sm_90", "--decode-precision", "fp8"], "decode_precision='fp8' needs a cache of format fp8, got"),
    ],
)
def test_invalid_arguments_are_errors(arguments, message, tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert cli.main(["compile", "--model", str(tmp_path), *arguments]) == cli.USER_ERROR
    error = capsys.readouterr().err
    assert error.startswith("flashlatte compile: ")
    assert error.count("\n") == 1
    assert re.search(message, error)
