"""``flashlatte bench vllm-steps`` with DeepSeek-V4 on a CPU: FlashLatte and FLASHMLA_SPARSE_DSV4 in layers for CUDA."""

import json

from support import tiny_v4, vllm_v4_cuda_engine

from flashlatte import bench
from flashlatte.bench.serving import vllm_steps

# Largest difference of a logprob between the backends, which round differently. With the first groups instead of the
# selected ones it is 0.15.
CLOSE = 0.05


def test_both_backends_generate_from_the_same_random_contexts(tmp_path, monkeypatch):
    """32 of 35 and 75 groups are selected. Contexts end within groups of 4 and of 128 tokens, and at their ends."""
    monkeypatch.setattr(vllm_steps, "ENGINE", vllm_v4_cuda_engine.__name__)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    model, file = tiny_v4.write(tmp_path / "model", index_topk=32), tmp_path / "steps.jsonl"
    given = [str(model), "--backends", "CUSTOM,FLASHMLA_SPARSE_DSV4", "--cases", "3x141,2x301", "--random-contexts"]
    given += ["--steps", "2", "--rounds", "1", "--options", json.dumps(vllm_v4_cuda_engine.OPTIONS)]
    assert bench.run_named("vllm-steps", [*given, "--json", str(file)]) == 0
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line["backend"] for line in lines] == ["custom", "flashmla_sparse_dsv4"] * 2
    for line in lines[1::2]:
        equal, largest = line["agreement"]["custom"]
        assert equal == line["requests"]
        assert largest < CLOSE
        assert line["index_logits"] == "flashlatte"
        assert line["stand_ins"] == {"mhc": "flashlatte", "compressor": "vllm_triton"}
