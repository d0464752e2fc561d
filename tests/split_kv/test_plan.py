import pytest

from flashlatte.split_kv import plan
from flashlatte.split_kv.plan import balanced_parts, fixed_groups

RECORD = 64 * 513 * 4


@pytest.mark.parametrize(
    ("items", "groups", "parts"),
    [
        (1, 1, 128),  # as the merging takes them
        (1, 2, 64),
        (3, 1, 132),  # 32 each would leave too many idle
        (128, 1, 128),  # one item each
        (256, 1, 128),  # two each
        (64, 1, 128),  # half an item each
        (90, 1, 132),  # one each would leave a third of the device idle
        (3, 33, 4),
    ],
)
def test_parts_of_long_items(items, groups, parts):
    assert balanced_parts(items, groups, 132, 1000, RECORD) == parts


def test_no_more_parts_than_blocks():
    assert balanced_parts(2, 1, 132, 5, RECORD) == 10


def test_no_parts_where_programs_abound():
    assert balanced_parts(5, 100, 132, 1000, RECORD) is None
    assert balanced_parts(20000, 1, 132, 1000, RECORD) is None
    assert balanced_parts(1000, 1, 132, 1000, RECORD, uniform=True) is None
    assert balanced_parts(140, 1, 132, 1000, RECORD, uniform=True) is not None


@pytest.mark.parametrize("resident", [16, 132, 264, 304])
@pytest.mark.parametrize("items", [1, 7, 300, 5000])
@pytest.mark.parametrize("groups", [1, 3, 8, 64, 150])
@pytest.mark.parametrize("record", [16 * 513 * 4, RECORD, 4 * RECORD])
def test_scratch_is_bounded(items, groups, resident, record):
    parts = balanced_parts(items, groups, resident, 4096, record)
    assert parts is None or 1 <= parts <= resident
    assert 2 * (parts or 0) * groups * record <= plan.MAX_SCRATCH_BYTES


def test_fixed_groups_cover_all_items_within_the_scratch():
    groups = fixed_groups(100, 3 << 20)
    assert [first for first, _ in groups] == list(range(0, 100, 20))
    assert sum(count for _, count in groups) == 100
    assert max(count for _, count in groups) * (3 << 20) <= plan.MAX_SCRATCH_BYTES
    assert fixed_groups(5, 1) == ((0, 5),)
    assert fixed_groups(2, 1 << 30) == ((0, 1), (1, 1))
