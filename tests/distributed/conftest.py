from __future__ import annotations

import pytest
from support.ranks import Ranks


@pytest.fixture(scope="session", params=[2, 3, 4])
def ranks(request):
    """Processes of this many ranks, shared by all tests of a run."""
    made = Ranks(request.param)
    yield made
    made.close()
