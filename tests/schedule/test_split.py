import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashlatte.schedule import split_schedule

BLOCK = 64


def parts_of(schedule):
    """The rows of the parts that have work, as ints."""
    return [row for row in schedule.tile_scheduler_metadata.tolist() if row[0] < len(schedule.num_splits) - 1]


def blocks_of(length, block_size):
    return max(-(-length // block_size), 1)


def walk(schedule, lengths, block_size):
    """(part, request, begin block, end block) of every share, in the order of the parts."""
    for index, (begin_req, end_req, begin_block, end_block, *_) in enumerate(parts_of(schedule)):
        for request in range(begin_req, end_req + 1):
            begin = begin_block if request == begin_req else 0
            end = end_block if request == end_req else blocks_of(lengths[request], block_size)
            yield index, request, begin, max(end, begin + 1) if lengths[request] <= 0 else end


def test_128_requests_of_4096_keys_over_144_parts():
    schedule = split_schedule([4096] * 128, 144, block_size=BLOCK, overhead=5)
    assert schedule.payload == 67
    rows = schedule.tile_scheduler_metadata[:4].tolist()
    keys = [(row[0], row[2] * BLOCK, row[1], row[3] * BLOCK, row[4]) for row in rows]
    assert keys == [
        (0, 0, 0, 3968, 0),
        (0, 3968, 1, 3520, 1),
        (1, 3520, 2, 3072, 1),
        (2, 3072, 3, 2624, 1),
    ]
    assert [row[5:7] for row in rows] == [[1, 1]] * 4
    assert schedule.num_splits[:4].tolist() == [0, 2, 4, 6]


def test_requests_that_fit_are_not_split():
    schedule = split_schedule([64, 64], 2)
    assert schedule.tile_scheduler_metadata.tolist() == [[0, 0, 0, 1, 0, 0, 0, 0], [1, 1, 0, 1, 0, 0, 0, 0]]
    assert schedule.num_splits.tolist() == [0, 1, 2]


def test_an_empty_request_has_one_block_and_ends_before_it():
    schedule = split_schedule([0], 1)
    assert schedule.tile_scheduler_metadata.tolist() == [[0, 0, 0, 0, 0, 0, 0, 0]]
    assert schedule.num_splits.tolist() == [0, 1]
    assert split_schedule([-5], 1).tile_scheduler_metadata.equal(schedule.tile_scheduler_metadata)


def test_a_tensor_of_lengths_is_a_list():
    lengths = [100, 7000, 0, 300]
    from_tensor = split_schedule(torch.tensor(lengths, dtype=torch.int32), 9)
    assert from_tensor.tile_scheduler_metadata.equal(split_schedule(lengths, 9).tile_scheduler_metadata)


@settings(max_examples=200)
@given(
    lengths=st.lists(st.one_of(st.integers(-1, 5), st.integers(0, 3000)), min_size=1, max_size=12),
    num_parts=st.integers(1, 40),
    block_size=st.sampled_from([1, 16, 64, 100]),
    overhead=st.integers(0, 7),
)
def test_every_schedule(lengths, num_parts, block_size, overhead):
    schedule = split_schedule(lengths, num_parts, block_size=block_size, overhead=overhead)
    metadata, requests = schedule.tile_scheduler_metadata, len(lengths)
    blocks = [blocks_of(length, block_size) for length in lengths]
    assert metadata.shape == (num_parts, 8)
    assert metadata.dtype == schedule.num_splits.dtype == torch.int32
    assert schedule.payload == -(-sum(count + overhead for count in blocks) // num_parts) + overhead

    shares = list(walk(schedule, lengths, block_size))
    next_block = [0] * requests
    splits, cost = [0] * requests, [0] * num_parts
    last_request = 0
    for part, request, begin, end in shares:
        assert request >= last_request
        assert begin == next_block[request] < end
        assert splits[request] == (parts_of(schedule)[part][4] if request == parts_of(schedule)[part][0] else 0)
        last_request, next_block[request] = request, end
        splits[request] += 1
        cost[part] += end - begin + overhead
    assert next_block == blocks
    assert max(cost) <= schedule.payload
    assert schedule.num_splits.diff().tolist() == splits
    assert schedule.num_splits[0] == 0

    for begin_req, end_req, _, end_block, _, first_splitted, last_splitted, pad in parts_of(schedule):
        assert first_splitted == (splits[begin_req] > 1)
        assert last_splitted == (splits[end_req] > 1)
        assert pad == 0
        assert lengths[end_req] > 0 or end_block == 0

    busy = len(parts_of(schedule))
    assert all(row[0] == requests for row in metadata[busy:].tolist())
    assert all(row[0] < requests for row in metadata[:busy].tolist())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"lengths": []}, ValueError, "^lengths must hold at least one request, got none$"),
        ({"num_parts": 0}, ValueError, "^num_parts must be at least 1, got 0$"),
        ({"num_parts": 1.5}, TypeError, "^num_parts must be an int, got float$"),
        ({"block_size": 0}, ValueError, "^block_size must be at least 1, got 0$"),
        ({"overhead": -1}, ValueError, "^overhead must be an int of at least 0, got -1$"),
        ({"overhead": 1.0}, ValueError, "^overhead must be an int of at least 0, got 1.0$"),
        ({"overhead": True}, ValueError, "^overhead must be an int of at least 0, got True$"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        split_schedule(**({"lengths": [1], "num_parts": 1} | change))
