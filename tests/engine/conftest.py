from __future__ import annotations

import pytest
from support.ranks import Ranks


@pytest.fixture(scope="session")
def two():
    """Two processes of one group, shared by all tests of a run."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four():
    """Four processes of one group, shared by all tests of a run."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()
