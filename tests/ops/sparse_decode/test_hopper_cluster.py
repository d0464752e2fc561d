"""Clusters of two CTAs: launch and compile tests, without a GPU."""

from __future__ import annotations

import re

import pytest
from support import compile as support
from support.later_spills import allowed
from support.marks import mostly_full

from flashlatte.runtime import machine

pytest.importorskip("triton")

from support.hopper_sparse_decode import CALLS, CLUSTER_KERNEL, KERNEL, recording

from flashlatte.kernels.hopper import clusters
from flashlatte.ops.sparse_decode.hopper import launch

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")

CLUSTERS = (
    "v32, whole items",
    "v32, ranges",
    "v32, ranges of one length",
    "model1, ranges",
    "v41, ranges",
    "v41_fp4, ranges",
)


@pytest.fixture
def record(monkeypatch):
    return recording(monkeypatch)


@pytest.mark.parametrize(
    ("call", "in_cluster"),
    [
        ({"heads": 128}, True),
        ({"heads": 65}, True),
        ({"heads": 256, "form": "model1"}, True),
        ({"heads": 64}, False),
        ({"heads": 192}, False),
        ({"heads": 128, "form": "bf16"}, False),
    ],
)
@pytest.mark.parametrize("batch", [1, 37, 128])
def test_adjacent_groups_of_heads_form_a_cluster(record, call, in_cluster, batch):
    launched = record(batch=batch, **call)
    assert launched.arguments["CONFIG"].cluster is in_cluster
    groups = launched.arguments["num_groups"]
    programs = launched.grid[0] * (2 if in_cluster else 1)
    assert programs % groups == 0
    if launched.arguments["CONFIG"].balanced and not launched.arguments["CONFIG"].equal_splits:
        assert programs == groups * launched.arguments["num_splits"]


def test_no_clusters_on_a_gpu_that_they_do_not_fill(record, monkeypatch):
    monkeypatch.setattr(launch, "clusters_fill", lambda *_: False)
    assert record().arguments["CONFIG"].cluster is False


@pytest.mark.parametrize("name", mostly_full(CLUSTERS, "v32, whole items"))
def test_halves_are_sent_by_bulk_copies(record, name):
    code = support.compile_gluon(KERNEL, record(**CALLS[name]))
    # The pieces of two blocks.
    assert len(re.findall(r"\bUBLKCP\b", code.sass)) >= (14 if name.startswith("model1") else 16)
    # Release stores to the peer would wait for all loads of the thread.
    assert not re.search(r"\bMEMBAR\.\w+\.GPU\b", code.sass)
    assert not re.search(r"\bSTAS\b", code.sass)


@pytest.mark.parametrize("name", mostly_full(CLUSTERS, "v32, whole items"))
def test_the_producer_does_not_spill_loaded_words(record, name):
    """A spill of a loaded word would wait for its load at once."""
    lines = support.compile_gluon(KERNEL, record(**CALLS[name])).sass.splitlines()
    sent = [i for i, line in enumerate(lines) if "UBLKCP" in line]
    spills = sum(bool(re.search(r"\b(?:STL|LDL)\b", line)) for line in lines[sent[0] : sent[-1]])
    assert spills <= allowed(f"sparse_decode producer {name}", 0)


@pytest.mark.parametrize("name", mostly_full(CLUSTERS, "v32, whole items"))
def test_tile_offsets_of_the_cluster(record, name):
    code = support.compile_gluon(KERNEL, record(**CALLS[name]))
    # Offsets of Triton's asynchronous copies: q follows the four tiles.
    placed = {int(offset, 16) for offset in re.findall(r"\bLDGSTS\S* \[R\d+\+(0x[0-9a-f]+)\]", code.sass)}
    assert {4 * clusters.TILE_BYTES.value, 5 * clusters.TILE_BYTES.value} <= placed
    if name.startswith("model1"):
        # The last 64 columns of a block.
        last = 3 * clusters.COLUMNS_BYTES.value
        for tile in (clusters.K0_RIGHT.value, clusters.K1_RIGHT.value):
            assert tile * clusters.TILE_BYTES.value + last in placed
    # The swizzle repeats after eight rows, the rows that a warp sends.
    assert clusters.WARP_ROWS.value == 8 * 128
    assert clusters.OWN_TOKENS.value * 128 == clusters.PEER_ROWS.value


def test_pairs_are_launched_as_clusters():
    assert CLUSTER_KERNEL.cluster == (2, clusters.TAIL_BYTES.value)
    assert KERNEL.cluster is None
