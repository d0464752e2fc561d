"""Errors that a single rank detects."""

import pytest
import torch
import torch.distributed as dist

from flashlatte.distributed import ContextParallel, PrefillRing, TensorParallelAttention, shard_metadata
from flashlatte.distributed.shard_plan import plan_shard
from flashlatte.kv_cache.sharding import Sharding
from flashlatte.layers import MLAConfig, MLAMetadataBuilder

TABLE, LENGTHS = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([9, 4], dtype=torch.int32)


@pytest.fixture
def context():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield ContextParallel(interleave=4)
    dist.destroy_process_group()


@pytest.fixture
def metadata():
    return MLAMetadataBuilder(16, 2, 32, 64, "cpu", num_pages=4).build([0, 1, 2], [9, 4], TABLE)


def test_without_a_process_group():
    for make in (ContextParallel, lambda: TensorParallelAttention(MLAConfig(64, 4))):
        with pytest.raises(ValueError, match=r"torch\.distributed has none: call"):
            make()


def test_arguments(context):
    with pytest.raises(ValueError, match=r"form must be one of direct, all_to_all, .*, got 'ring'"):
        ContextParallel(form="ring")
    with pytest.raises(ValueError, match="sharding's interleave must be at least 1, got 0"):
        ContextParallel(interleave=0)
    with pytest.raises(ValueError, match="page_tokens must be a multiple of 4, the number of ranks"):
        context.plan(TABLE, LENGTHS, page_tokens=6)
    with pytest.raises(TypeError, match="cache_seqlens must be int32 or int64"):
        context.plan(TABLE, LENGTHS.float(), page_tokens=8)


@pytest.mark.parametrize(
    "make",
    [
        ContextParallel,
        PrefillRing,
        lambda *args, **options: TensorParallelAttention(MLAConfig(64, 4), *args, **options),
    ],
)
def test_groups_and_timeouts(context, make):
    with pytest.raises(TypeError, match=r"^timeout must be of type timedelta, got int$"):
        make(timeout=60)
    with pytest.raises(TypeError, match=r"^group must be a process group that this rank is in, got "):
        make(group=dist.GroupMember.NON_GROUP_MEMBER)


def test_blocks_of_a_prompt(context):
    ring = PrefillRing()
    with pytest.raises(ValueError, match=r"^tokens must be at least 0, got -1$"):
        ring.positions(-1)
    with pytest.raises(ValueError, match=r"^rank must be from 0 to 0, got 1$"):
        ring.positions(5, rank=1)


def test_a_plan_for_another_cache_or_batch(context):
    plan = context.plan(TABLE, LENGTHS, page_tokens=8, queries=2)
    q, cache = torch.zeros(2, 2, 1, 24), torch.zeros(3, 8, 1, 24)
    with pytest.raises(ValueError, match="k_cache must have the plan's pages of 8 tokens, got pages of 4"):
        context.decode(q, cache[:, :4], plan, head_dim_v=16)
    with pytest.raises(ValueError, match="q must have the plan's 2 requests of 2 queries"):
        context.decode(q[:, :1], cache, plan, head_dim_v=16)
    with pytest.raises(TypeError, match=r"^plan must be of type ShardPlan, got NoneType$"):
        context.decode(q, cache, None, head_dim_v=16)
    with pytest.raises(ValueError, match="plan must be made for Sharding\\(rank=0, size=1, interleave=1\\)"):
        ContextParallel().decode(q, cache, plan, head_dim_v=16)
    with pytest.raises(ValueError, match="plan must be made with cache_format 'v32'"):
        context.decode(torch.zeros(2, 2, 1, 576), torch.zeros(3, 8, 1, 656, dtype=torch.uint8), plan)
    with pytest.raises(ValueError, match="k_scale belongs to cache format fp8, got fp32"):
        context.decode(q, cache, plan, head_dim_v=16, k_scale=2.0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda rope: rope.tolist(), TypeError, "^q_rope must be a tensor, got list$"),
        (lambda rope: rope.half(), TypeError, "^q_rope must be float32, got float16$"),
        (lambda rope: rope[:1], ValueError, r"^q_rope must have shape \[2, 2, 1, rope\] .* got \[1, 2, 1, 8\]$"),
        (lambda rope: rope[..., :0], ValueError, r"^q_rope must have shape .* got \[2, 2, 1, 0\]$"),
        (lambda rope: rope[..., ::2], ValueError, "^q_rope must have last stride 1, got strides"),
        (lambda rope: rope[..., :4], ValueError, r"^k_cache .*must have .*20"),
    ],
)
def test_queries_in_two_tensors(context, change, error, message):
    plan = context.plan(TABLE, LENGTHS, page_tokens=8, queries=2)
    q, rope, cache = torch.zeros(2, 2, 1, 16), torch.zeros(2, 2, 1, 8), torch.zeros(3, 8, 1, 24)
    slots = torch.zeros(2, 2, 3, dtype=torch.int32)
    for call in (
        lambda parts: context.decode(q, cache, plan, head_dim_v=16, q_rope=parts),
        lambda parts: context.sparse_decode(q, cache, slots, head_dim_v=16, q_rope=parts),
    ):
        call(rope)
        with pytest.raises(error, match=message):
            call(change(rope))


def test_metadata(context, metadata):
    divided = shard_metadata(metadata, context)
    assert divided.to(torch.device("cpu")).sharding == context.sharding
    with pytest.raises(ValueError, match="metadata must not be sharded already"):
        shard_metadata(divided, context)
    layer = TensorParallelAttention(MLAConfig(64, 4, kv_lora_rank=32, qk_rope_head_dim=8)).layer
    with pytest.raises(ValueError, match="indices must be None with sharded metadata"):
        layer(torch.zeros(2, 64), torch.zeros(4, 16, 1, 40), divided, indices=torch.zeros(2, 1, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_negative_length_has_no_keys(dtype):
    lengths = torch.tensor([torch.iinfo(dtype).min, -1, 0, 1], dtype=dtype)
    table = torch.zeros(4, 2, dtype=torch.int32)
    plan = plan_shard(Sharding(rank=0, size=2), table, lengths, page_tokens=64, queries=2)
    assert plan.query_lens.tolist() == [[0, 0], [0, 0], [0, 0], [0, 1]]
