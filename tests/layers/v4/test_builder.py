"""A padded step in a CUDA graph follows updates of the builder's buffers."""

from __future__ import annotations

import pytest
import torch

from flashlatte.layers import V4Config, V4Step
from flashlatte.layers.v4.builder import V4Builder

LAYERS = [
    V4Config(64, ratio=4),
    V4Config(64, ratio=128, indexer=None),
    V4Config(64, ratio=0, indexer=None),
]
PAGE, MAX_PAGES = 128, 5


def builder(requests: int = 4) -> V4Builder:
    return V4Builder(LAYERS, PAGE, requests, MAX_PAGES, torch.device("cpu"))


def contents(step: V4Step, requests: int) -> dict[str, list[list[int]]]:
    """The metadata of a step's first tokens, without trailing -1 in slots, of which a wide table has more."""
    found = {}
    tensors = {name: getattr(step, name) for name in ("positions", "slots", "window_slots", "window_counts")}
    for ratio, groups in step.groups.items():
        parts = {
            "slots": groups.slots,
            "seen": groups.num_visible,
            "all": groups.all_slots,
            "states": groups.state_table,
        }
        tensors |= {f"{name} {ratio}": tensor for name, tensor in parts.items()}
    for name, tensor in tensors.items():
        rows = tensor[:requests].reshape(requests, -1).tolist()
        found[name] = [row[: max((i for i, value in enumerate(row) if value != -1), default=0) + 1] for row in rows]
    return found


def test_buffers_of_a_graph_follow_the_steps():
    made = builder()
    table = torch.randperm(40)[: 3 * MAX_PAGES].view(3, MAX_PAGES)
    held = None
    # Across ends of groups of both ratios, and of pages.
    for positions in ([2, 126, 383], [3, 127, 384], [4, 128, 385], [7], [130, 511], [131, 512, 0]):
        requests = len(positions)
        width = max(positions) // PAGE + 1
        spans, places = [(at, at + 1) for at in positions], list(range(requests))[::-1]
        padded = made.build(spans, table[:requests, :width], places, pad_requests_to=4)
        assert padded.num_tokens == 4
        held = held or padded
        assert padded.buffers is held.buffers
        step, new = held.step(), made.build(spans, table[:requests, :width], places).step()
        assert contents(step, requests) == contents(new, requests)
        # Padding tokens are not stored and attend to nothing.
        assert (step.request_ids[requests:] == -1).all()
        for nothing in (step.slots, step.window_slots, *(groups.slots for groups in step.groups.values())):
            assert (nothing[requests:] == -1).all()
        for none in (step.window_counts, *(groups.num_visible for groups in step.groups.values())):
            assert (none[requests:] == 0).all()


def test_a_padded_step_without_requests():
    made = builder()
    made.build([(5, 6)], torch.tensor([[7]]), [3], pad_requests_to=2)
    idle = made.build([], torch.empty(0, 1, dtype=torch.int32), [], pad_requests_to=2)
    step = idle.step()
    assert (idle.num_tokens, step.request_ids.tolist(), step.slots.tolist()) == (2, [-1, -1], [-1, -1])
    assert all(groups.num_visible.tolist() == [0, 0] for groups in step.groups.values())


def test_reallocated_states_are_other_buffers():
    made, table = builder(requests=2), torch.zeros(1, 1, dtype=torch.int32)
    first = made.build([(0, 1)], table, [1], pad_requests_to=1)
    kept = first.states[0][0]
    assert kept is not None
    kept.fill_(3)
    later = made.build([(0, 1)], table, [2], pad_requests_to=1)
    assert later.buffers is not first.buffers
    grown = later.states[0][0]
    assert grown is not None
    assert grown[: len(kept)].equal(kept)
    assert len(grown) == len(kept) // 2 * 3


@pytest.mark.parametrize(
    ("spans", "size", "pages", "message"),
    [
        ([(0, 2)], 1, 1, r"^pad_requests_to needs one new token for each request, got spans \[\(0, 2\)\]$"),
        ([(0, 1)], 5, 1, "^pad_requests_to must be from 1 to 4, got 5$"),
        ([(0, 1)], 0, 1, "^pad_requests_to must be from 1 to 4, got 0$"),
        ([(0, 1)], 1, 6, "^block_table must have at most 5 pages, got 6$"),
    ],
)
def test_steps_that_cannot_be_padded(spans, size, pages, message):
    with pytest.raises(ValueError, match=message):
        builder().build(spans, torch.zeros(1, pages, dtype=torch.int32), [0], pad_requests_to=size)
