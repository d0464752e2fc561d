import pytest

from flashlatte.split_kv import combine, plan
from flashlatte.split_kv.plan import PartialShape, fixed_launches, num_ranges

PARTIAL = PartialShape(64, 512)


@pytest.mark.parametrize(
    ("items", "groups", "ranges"),
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
def test_ranges_of_long_items(items, groups, ranges):
    assert num_ranges(items, groups, 132, 1000, PARTIAL) == ranges


def test_no_more_ranges_than_blocks():
    assert num_ranges(2, 1, 132, 5, PARTIAL) == 10


def test_no_ranges_with_many_programs():
    assert num_ranges(5, 100, 132, 1000, PARTIAL) is None
    assert num_ranges(20000, 1, 132, 1000, PARTIAL) is None
    assert num_ranges(1000, 1, 132, 1000, PARTIAL, uniform=True) is None
    # The total cost must fit the 32-bit sums of the kernels.
    assert num_ranges(1000, 1, 132, 1 << 20, PARTIAL) is not None
    assert num_ranges(1024, 1, 132, 1 << 20, PARTIAL) is None
    assert num_ranges(140, 1, 132, 1000, PARTIAL, uniform=True) is not None


@pytest.mark.parametrize("resident", [16, 132, 264, 304])
@pytest.mark.parametrize("items", [1, 7, 300, 5000])
@pytest.mark.parametrize("groups", [1, 3, 8, 64, 150])
@pytest.mark.parametrize("partial", [PartialShape(16, 512), PARTIAL, PartialShape(256, 512)])
def test_scratch_is_bounded(items, groups, resident, partial):
    ranges = num_ranges(items, groups, resident, 4096, partial)
    assert ranges is None or 1 <= ranges <= resident
    if ranges is not None:
        split = plan.balanced(partial, items, 4096, groups, groups, ranges, 1)
        assert 4 * split.scratch <= plan.MAX_SCRATCH_BYTES


def test_fixed_launches_cover_all_items_within_the_scratch():
    groups = fixed_launches(100, 3 << 20)
    assert [first for first, _ in groups] == list(range(0, 100, 20))
    assert sum(count for _, count in groups) == 100
    assert max(count for _, count in groups) * (3 << 20) <= plan.MAX_SCRATCH_BYTES
    assert fixed_launches(5, 1) == ((0, 5),)
    assert fixed_launches(2, 1 << 30) == ((0, 1), (1, 1))


@pytest.mark.parametrize("items", [0, 5, 1 << 27])
def test_whole_items_need_one_launch(items):
    """``split_kv.work`` numbers the work items of such a launch from 0."""
    assert plan.whole(PARTIAL, items, 1, 1).launches == (((0, items),) if items else ())


@pytest.mark.parametrize("items", [1, 7, 300, 5000])
@pytest.mark.parametrize("item_blocks", [1, 16, 5000])
def test_fixed_splits_fit_the_scratch(items, item_blocks):
    split = plan.fixed(PARTIAL, items, item_blocks, groups=2, groups_per_head=2, split_blocks=16, max_splits=64)
    assert 4 <= 4 * split.scratch <= plan.MAX_SCRATCH_BYTES
    assert split.splits == min(max(item_blocks // 16, 1), 64)
    assert sum(count for _, count in split.launches) == items
    most = max(count for _, count in split.launches)
    assert split.combines == (item_blocks > 16)
    assert not split.combines or split.scratch == most * (2 * split.splits * PARTIAL.elements + 1)
    assert split.ctas(most) == most * 2 * split.splits


@pytest.mark.parametrize("results", [1, 16, 132, 1000])
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("splits", [1, 4, 132])
def test_tiles_of_the_combine_cover_a_result(results, rows, splits):
    tile = combine.tile_for(PARTIAL, rows, results, splits)
    assert tile.rows <= 64
    assert tile.ctas(rows, 512) * tile.rows * tile.cols >= rows * 512
    assert results * tile.ctas(rows, 512) <= 528 or tile.rows == 4
