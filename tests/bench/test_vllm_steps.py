"""What ``flashlatte bench vllm-steps`` makes of engines' answers; tests with engines need vLLM."""

import pytest

from flashlatte.bench.serving.vllm_engine import EngineProcess
from flashlatte.bench.serving.vllm_steps import ATTENTION, BackendTimes, agreement, surviving


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([[[5, -1.0], [6, -2.0]]], [[[5, -1.0], [6, -2.5]]], (1, 0.5)),
        ([[[5, -1.0], [6, -2.0]]], [[[5, -1.25], [7, -9.0]]], (0, 0.25)),
        # Behind a different token the contexts differ.
        ([[[4, -1.0], [6, -2.0]], [[1, -1.0]]], [[[5, -1.5], [6, -9.0]], [[1, -1.125]]], (1, 0.125)),
    ],
)
def test_agreement_ends_at_the_first_different_token(ours, theirs, expected):
    assert agreement(ours, theirs) == expected


@pytest.mark.parametrize(
    ("kernel", "is_attention"),
    [
        ("dense_decode_kernel", True),
        ("combine_fp24_kernel", True),
        ("dense_prefill_forward_kernel", True),
        ("void legacy::sm90::decode::dense::flash_fwd_splitkv_mla_kernel<>", True),
        ("void legacy::smxx::decode::flash_fwd_mla_combine_kernel<>", True),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<>>>", True),
        ("void flash::prepare_varlen_num_blocks_kernel<>", True),
        ("_fwd_grouped_kernel_stage1", True),
        ("void vllm::concat_and_cache_mla_kernel<>", False),
        ("concat_mla_q_kernel", False),
        ("nvjet_sm90_tst_192x128_64x5_2x1_v_bz_coopB_TNT", False),
        ("void cublasLt::splitKreduce_kernel<>", False),
        ("void vllm::act_and_mul_kernel<>", False),
    ],
)
def test_kernels_of_attention(kernel, is_attention):
    assert (ATTENTION.search(kernel) is not None) == is_attention


def test_an_engine_that_ends_leaves_the_others(capsys):
    """Here both engines end at once, as there is no vLLM; one before it is asked, one while it is."""
    engines = [EngineProcess("CUSTOM", {}) for _ in range(2)]
    engines[0].process.wait()
    assert surviving(map(BackendTimes, engines), lambda row: row.engine.ask("about")) == []
    assert capsys.readouterr().err.count("the engine with CUSTOM ended with") == 2
