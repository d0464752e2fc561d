"""Which of a test's cases run always."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_full(names: Iterable[str | float], *quick: str | float) -> list[Any]:
    """Names or numbers as parameters: those of ``quick`` run always, the others in ``make test-all`` only."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.full) for name in names]
