from __future__ import annotations

import pytest
from support.marks import mostly_full
from support.ranks import Ranks


@pytest.fixture(scope="session", params=mostly_full((2, 3, 4), 2, 3))
def ranks(request):
    """Processes of this many ranks, shared by all tests of a run."""
    made = Ranks(request.param)
    yield made
    made.close()
