"""Marks for the cases of a test that run in ``make test-full`` only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_full(names: Iterable[str | float], *quick: str | float) -> list[Any]:
    """Test parameters: those in ``quick`` always run, the others in ``make test-full`` only."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.full) for name in names]
