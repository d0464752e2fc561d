import json
import os
import re
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from flashlatte import cli, doctor
from flashlatte.distributed import diagnostics as ranks
from flashlatte.layers import MLAConfig
from flashlatte.runtime import dispatch

needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU does")


@needs_cpu
def test_doctor_json_lists_every_operation_with_reasons(capsys):
    assert cli.main(["doctor", "--json", "--dtype", "fp32"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["device"]["type"] == "cpu"
    assert facts["versions"]["torch"] == torch.__version__
    assert {entry["operation"] for entry in facts["operations"]} == set(dispatch.operations())
    assert all(entry["runs"] == "reference" for entry in facts["operations"])
    assert all("hopper" in entry["refusals"] for entry in facts["operations"])
    formats = {(entry["operation"], entry["cache_format"]) for entry in facts["operations"]}
    assert {("dense_decode", "fp8"), ("sparse_decode", "v32"), ("sparse_decode", "model1")} <= formats
    assert not {("dense_decode", "v32"), ("sparse_decode", "fp8")} & formats


def test_doctor_agrees_with_select():
    for call, entry in zip(
        doctor.typical_calls(torch.device("cpu"), torch.bfloat16), doctor.diagnose()["operations"], strict=True
    ):
        if not torch.cuda.is_available():
            assert entry["runs"] == dispatch.select(call)


MODEL = {
    "model_type": "glm4_moe_lite",
    "hidden_size": 2048,
    "num_attention_heads": 20,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "max_position_embeddings": 202752,
}


@pytest.mark.parametrize("folder", [True, False])
def test_doctor_of_a_model(tmp_path, capsys, folder):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    path = str(tmp_path if folder else tmp_path / "config.json")
    assert cli.main(["doctor", "--all", "--model", path]) == 0
    printed = capsys.readouterr().out
    assert "model: 20 heads of 192 + 64 and 256, rows of 512 + 64, query latent 768, softmax scale 0.06250" in printed
    assert "over model1" not in printed


def test_doctor_of_a_model_counts_its_heads(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    config = MLAConfig.from_transformers(doctor.read_fields(tmp_path))
    calls = doctor.typical_calls(torch.device("cpu"), torch.bfloat16, config)
    assert {call.h_q for call in calls} == {20, None}
    assert {call.cache_format for call in calls} == {"bf16", "fp8", "v32", "nvfp4_ds_mla", None}
    prefill = next(call for call in calls if call.operation == "dense_prefill")
    assert (prefill.head_dim, prefill.head_dim_v, prefill.h_kv) == (256, 256, 20)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "model must be a config.json, and .* is not JSON"),
        ("[]", "model must be a config.json, and .* holds no object"),
        ("[" * 10**5, "model must be a config.json, and .* is not JSON: maximum recursion depth exceeded"),
        ('{"num_hidden_layers": ' + "9" * 5000 + "}", "model must be a config.json, and .* is not JSON: Exceeds the"),
        ('{"model_type": "llama"}', "config must be an MLA model's, with kv_lora_rank, got model_type llama"),
        ('{"model_type": "deepseek_v4", "head_dim": 512}', "config must have num_hidden_layers, .* without"),
        ('{"model_type": "glm5_next", "kv_lora_rank": 512}', "model_type 'glm5_next' is not supported: its indexer"),
        (None, "No such file"),
    ],
)
def test_doctor_for_a_model_without_mla(tmp_path, capsys, text, message):
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    assert cli.main(["doctor", "--model", str(file)]) == cli.USER_ERROR
    assert re.search(f"^flashlatte doctor: .*{message}", capsys.readouterr().err)


def test_doctor_of_a_model_with_an_indexer(tmp_path, capsys):
    indexer = {"model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    (tmp_path / "config.json").write_text(json.dumps(MODEL | indexer))
    assert cli.main(["doctor", "--model", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "indexer: 64 heads of 128 select 2048 tokens. Steps use sparse_decode and sparse_prefill" in printed
    assert re.search(r"^paged_index_logits over index_fp8(, index_bf16)? +\w+$", printed, re.MULTILINE)


DOTS3 = MODEL | {
    "model_type": "dots3_note",
    "num_hidden_layers": 3,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 2048,
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
    "sliding_window": 512,
    "per_layer_config": {"1": {"kv_lora_rank": 1024, "num_attention_heads": 64}},
}


def test_doctor_of_layers_that_differ(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(DOTS3))
    assert cli.main(["doctor", "--model", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "2 of 3 layers: 20 heads of 192 + 64 and 256, rows of 512 + 64" in printed
    assert re.search(r"^1 of 3 layers: 64 heads of .*, a window of 512 tokens$", printed, re.MULTILINE)
    operations = doctor.diagnose(model=tmp_path)["operations"]
    assert {entry["layers"] for entry in operations} == {"2 of 3 layers", "1 of 3 layers"}
    # Only the narrow rows fit the formats of DeepSeek.
    formats = {(entry["layers"], entry["cache_format"]) for entry in operations if entry["operation"] == "cache_write"}
    assert {layers for layers, cache_format in formats if cache_format == "v32"} == {"2 of 3 layers"}


def test_doctor_names_the_backend_of_calls_with_sinks(tmp_path, capsys):
    sizes = {"index_n_heads": 16, "index_head_dim": 128, "index_topk": 2048, "num_hidden_layers": 6}
    (tmp_path / "config.json").write_text(json.dumps(MODEL | sizes | {"model_type": "hy_v4"}))
    assert cli.main(["doctor", "--model", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "attention sinks: sparse_decode and sparse_prefill take them" in printed
    assert re.search(r"^sparse_decode with attn_sink over bf16, v32, nvfp4_ds_mla +\w+$", printed, re.MULTILINE)
    assert re.search(r"^sparse_prefill with attn_sink +\w+$", printed, re.MULTILINE)
    assert "dense_decode with attn_sink" not in printed


V4_MODEL = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 5,
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
    "index_topk": 512,
    "compress_ratios": [0, 0, 4, 128, 4],
}


def test_doctor_of_deepseek_v4(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(V4_MODEL))
    assert cli.main(["doctor", "--model", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "model: 16 heads, rows of 448 + 64" in printed
    assert "2 of 5 layers: a window of 128 tokens only" in printed
    assert "2 of 5 layers: a window of 128 tokens and 512 groups of 4, selected by 32 heads of 128" in printed
    assert "1 of 5 layers: a window of 128 tokens and all groups of 128" in printed
    for operation in ("sparse_decode with attn_sink", "cache_gather"):
        assert re.search(rf"^{operation} over bf16, model1, v41, v41_fp4 +\w+$", printed, re.MULTILINE)
    assert "dense_decode" not in printed


def test_doctor_of_deepseek_v41(tmp_path, capsys):
    layers = {"compress_ratios": [0, 2, 2, 1, 1], "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3, 4]}
    candidates = {"candidate_source_layer_id": 3, "candidate_topk_blocks": 64, "candidate_block_size": 32}
    text = V4_MODEL | layers | candidates | {"model_type": "deepseek_v41_text"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v41", "text_config": text}))
    assert cli.main(["doctor", "--model", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "1 of 5 layers: a window of 128 tokens only" in printed
    assert "2 of 5 layers: a window of 128 tokens and 512 groups of 2, selected by 32 heads of 128" in printed
    assert "2 of 5 layers: a window of 128 tokens and 512 groups of 1, selected by 32 heads of 128" in printed
    assert re.search(
        r"^sparse_decode with attn_sink over bf16, model1, v41, v41_fp4, v41 with v41_fp4 +\w+$", printed, re.MULTILINE
    )
    assert re.search(r"^cache_write over bf16, model1, v41, v41_fp4 +\w+$", printed, re.MULTILINE)
    assert re.search(r"^sparse_index_logits over index_fp8, index_bf16 +\w+$", printed, re.MULTILINE)
    assert "dense_decode" not in printed


def test_doctor_of_several_gpus(monkeypatch, capsys):
    assert cli.main(["doctor"]) == 0
    assert re.search("^multi-GPU: torch.distributed has .*gloo; ", capsys.readouterr().out, re.MULTILINE)
    links = torch.tensor([[0, 18], [18, 0]])
    found = SimpleNamespace(matrix=links)
    monkeypatch.setattr("torch._C._distributed_c10d._detect_dma_connectivity", lambda *_: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert ranks.report(ranks.diagnose()).endswith("; 2 GPUs, all connected by NVLink")
    links[1, 0] = 0
    assert ranks.report(ranks.diagnose()).endswith("; 2 GPUs, not all connected by NVLink")
    monkeypatch.delattr("torch._C._distributed_c10d._detect_dma_connectivity")
    assert ranks.report(ranks.diagnose()).endswith("; 2 GPUs")


@needs_cpu
def test_doctor_without_a_gpu_is_one_screen(capsys):
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    assert any(
        re.match(r"cache_write over bf16, fp8, v32, nvfp4_ds_mla, model1, v41, v41_fp4 +reference$", line)
        for line in lines
    )
    named = [name for line in lines if line.endswith(" reference") for name in re.findall(r"\w+", line)]
    assert set(doctor.dispatch.operations()) <= set(named)
    assert sum("H100 or H200" in line for line in lines) == 1
    assert not any("not hopper" in line for line in lines)


MINICPM3 = {
    "model_type": "minicpm3",
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}


@needs_cpu
@pytest.mark.parametrize(
    ("options", "without", "hopper"),
    [
        (
            [],
            "",
            "dense_decode, sparse_decode, sparse_prefill, sparse_attention_backward, indexer_loss, dense_prefill, "
            "dense_prefill_backward, paged_attention,",
        ),
        (["--dtype", "fp32"], " but dense_decode, .*, turboquant_decode", "index_logits, paged_index_logits, topk"),
        (["--dtype", "fp16"], "", "dense_decode, sparse_prefill, "),
        (["--model", "config.json"], "", "dense_prefill, paged_attention, "),
        (["--model", "config.json", "--dtype", "fp32"], " but dense_decode, .*", "index_logits, "),
    ],
)
def test_doctor_lists_operations_with_gpu_kernels(options, without, hopper, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MODEL | MINICPM3))
    assert cli.main(["doctor", *options]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    begin = rf"On a GPU, portable kernels \(Triton\) run every operation{without}[,;] on an H100 or H200"
    assert re.search(rf"{begin}, hopper kernels run {hopper}", printed)
    # The assumed GPU is forgotten.
    assert doctor.diagnose()["operations"][0]["runs"] == "reference"


@needs_cpu
def test_doctor_without_triton(monkeypatch, capsys):
    monkeypatch.setattr("flashlatte.runtime.refusals._TRITON_INSTALLED", False)
    assert cli.main(["doctor"]) == 0
    assert "GPU kernels need Triton, which is not installed.\n" in capsys.readouterr().out


def test_doctor_lists_every_reason_with_all(capsys):
    assert cli.main(["doctor", "--all"]) == 0
    printed = capsys.readouterr().out
    operations = doctor.diagnose()["operations"]
    assert printed.count(": it ") == sum(len(entry["refusals"]) for entry in operations)
    assert "dense_decode over fp8" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--case", "nonsense"], "flashlatte bench: no case named 'nonsense'"),
        (["demo", "--file", "no/such/file"], "flashlatte demo: the prompt file cannot be read: no/such/file: No such"),
        (
            ["doctor", "--model", "no/such/file"],
            "flashlatte doctor: model must be a config.json or its folder, and no/such/file cannot be read: No such",
        ),
        (
            ["compile", "--model", "no/such/file", "--target", "sm_90"],
            "flashlatte compile: model must be a config.json or its folder, and no/such/file cannot be read: No such",
        ),
        (["demo", "--new-tokens", "0"], "flashlatte demo: "),
    ],
)
def test_user_errors_print_one_line_and_exit_with_2(arguments, message, capsys):
    assert cli.main(arguments) == cli.USER_ERROR
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_unknown_commands_exit_with_2():
    with pytest.raises(SystemExit, match="2"):
        cli.main(["brew"])


def test_only_torchs_numpy_warning_is_suppressed(monkeypatch):
    def warning(arguments):
        warnings.warn("Failed to initialize NumPy: No module named 'numpy' (Triggered internally at …)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        return 0

    monkeypatch.setattr(cli, "_doctor", warning)
    with pytest.warns(UserWarning, match="something else") as caught:
        assert cli.main(["doctor"]) == 0
    assert [str(one.message) for one in caught] == ["something else"]


@pytest.mark.full
def test_no_numpy_warning_precedes_the_output(tmp_path):
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}

    def stderr_of(*command):
        run = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=True)
        return run.stderr

    if "Failed to initialize NumPy" not in stderr_of("-c", "import torch"):
        pytest.skip("this torch does not warn when NumPy is missing")
    assert stderr_of("-m", "flashlatte", "bench", "--list") == ""


@pytest.mark.full
def test_a_closed_pipe_is_not_an_error():
    command = f"{sys.executable} -m flashlatte.cli doctor --json | true"
    finished = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert finished.returncode == 0
    assert "Broken pipe" not in finished.stderr


def test_an_interrupt_while_the_options_are_read_is_exit_code_130(monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_parser", interrupt)
    assert cli.main([]) == 130
    assert capsys.readouterr().err == ""
