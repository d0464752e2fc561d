"""The problems of benchmark cases: their shapes, as values that compare and print."""

# ruff: noqa: F403
from flashlatte.bench.problems.attention import *
from flashlatte.bench.problems.base import *
from flashlatte.bench.problems.caches import *
from flashlatte.bench.problems.indexer import *
from flashlatte.bench.problems.layer import *
