"""Tile sizes for row widths that are not in the tables."""

import pytest

from flashlatte.kernels.triton.config import SELECTED_ROWS, AttentionConfig, choose
from flashlatte.ops.dense_decode.portable.launch import FP8_TABLE, TABLE
from flashlatte.ops.sparse_decode.portable.launch import PACKED_TOKENS, STAGED_TOKENS

TABLES = {
    "dense": TABLE,
    "dense fp8": FP8_TABLE,
    "packed": PACKED_TOKENS,
    "staged": STAGED_TOKENS,
    "selected": SELECTED_ROWS,
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
def test_block_h_grows_in_every_gpu_class(table):
    assert table.keys() == TABLE.keys()
    for configs in table.values():
        sizes = [config.block_h for config in configs]
        assert sizes == sorted(set(sizes))
        for config in configs:
            # The warp-group layout requires 64 rows and two warp groups.
            assert not config.warpgroups or (config.block_h, config.num_warps) == (64, 8)


def test_choose_takes_the_first_fit_or_the_last():
    for rows, block_h in ((1, 16), (16, 16), (17, 32), (33, 64), (1000, 64)):
        assert choose(TABLE, "hopper", rows, 576, 512, in_place=True)[0].block_h == block_h


def test_widths_are_padded():
    _, step = choose(TABLE, "ampere", 16, 48, 40, in_place=True)
    assert (step.head_dim, step.latent_dim, step.latent, step.rope) == (48, 40, 64, 16)
    assert choose(TABLE, "ampere", 16, 512, 512, in_place=True)[1].rope == 0


def test_warpgroups_require_their_tile_widths():
    config, step = choose(TABLE, "hopper", 64, 512, 512, in_place=True)
    assert config.warpgroups
    assert step.values_first
    assert not choose(FP8_TABLE, "hopper", 64, 512, 512, in_place=False)[1].values_first
    config, step = choose(TABLE, "hopper", 64, 256, 256, in_place=True)
    assert not config.warpgroups
    assert not step.values_first
    assert config.block_n == 32


def test_wide_rows_get_smaller_tiles():
    table = {"one": (AttentionConfig(64, 64, num_warps=8, num_stages=5, programs=2),)}
    config, _ = choose(table, "one", 64, 1024, 1024, in_place=True)
    assert (config.block_h, config.block_n, config.num_stages, config.programs) == (32, 32, 3, 1)
    table = {"one": (AttentionConfig(16, 16, num_warps=8, num_stages=3),)}
    config, _ = choose(table, "one", 16, 1024, 1024, in_place=True)
    assert (config.block_h, config.block_n, config.num_stages) == (16, 16, 2)
