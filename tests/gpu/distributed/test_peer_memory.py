"""Peer memory: sums, and buffers that grow."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from flashlatte.distributed.agreement import Agreement
from flashlatte.distributed.peer_memory import PeerMemory
from flashlatte.distributed.push import push

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def memory(group) -> PeerMemory:
    device = torch.device("cuda", torch.cuda.current_device())
    reached = PeerMemory.connect(group, device, Agreement(group, timedelta(seconds=20)))
    assert isinstance(reached, PeerMemory), reached
    return reached


def summands(dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
    """The summands of every rank."""
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(shape, device="cuda", generator=generator).to(dtype) for _ in range(dist.get_world_size())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 8), (7, 1000), (64, 7168), (128, 7168)])
def test_sum(memory, shape, dtype):
    ranks = summands(dtype, *shape)
    mine = ranks[dist.get_rank()]
    assert memory.sums(mine[:1])
    total = memory.sum(mine)
    expected = torch.stack(ranks).double().sum(0)
    # Each addition rounds by up to half an ulp of the partial sum.
    ulps = len(ranks) / 2 * torch.finfo(dtype).eps
    assert ((total - expected).abs() <= ulps * torch.stack(ranks).double().abs().sum(0)).all()
    everyone = [torch.empty_like(total) for _ in ranks]
    dist.all_gather(everyone, total)
    assert all(one.equal(total) for one in everyone)


def test_sum_in_a_graph(memory):
    ranks = summands(torch.bfloat16, 64, 7168)
    x = ranks[dist.get_rank()].clone()
    memory.sum(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = memory.sum(memory.sum(x))
    for factor in (1, 2, 3):
        x.copy_(ranks[dist.get_rank()] * factor)
        graph.replay()
        assert total.equal(memory.sum(memory.sum(x)))


def test_tensors_stay_valid_when_buffers_grow(memory):
    rank, size = dist.get_rank(), dist.get_world_size()
    small = memory.take(((5,), torch.float32), pool="queries")
    small.parts[0][rank].fill_(rank)
    large = memory.take(((2**24,), torch.float32), ((3,), torch.int64), pool="queries")
    large.parts[0][rank].fill_(rank + 10)
    large.parts[1][rank].fill_(rank + 20)
    small.barrier()
    large.barrier()
    for other in range(size):
        assert small.parts[0][other].eq(other).all()
        assert large.parts[0][other].eq(other + 10).all()
        assert large.parts[1][other].eq(other + 20).all()
    large.barrier()
    assert memory.take(((5,), torch.float32), pool="queries") is small


def test_a_graph_is_not_the_first_to_need_more(memory):
    with (
        pytest.raises(RuntimeError, match="make the call once before capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        memory.take(((2**30,), torch.uint8), pool="queries")


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(64, 32, 576), (3, 2, 576), (1, 1, 5), (7, 3, 33)])
def test_push_stores_on_every_rank(memory, tokens, heads, dim):
    rank, size = dist.get_rank(), dist.get_world_size()
    taken = memory.take(((tokens, size * heads, dim), torch.bfloat16), pool="queries")
    (everywhere,) = taken.parts
    everywhere[rank].fill_(torch.nan)
    taken.barrier()
    ranks = summands(torch.bfloat16, tokens, heads, dim)
    push(ranks[rank], [whole.chunk(size, 1)[rank] for whole in (*everywhere[rank + 1 :], *everywhere[: rank + 1])])
    taken.barrier()
    assert everywhere[rank].equal(torch.cat(ranks, dim=1))
    taken.barrier()
