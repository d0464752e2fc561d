from __future__ import annotations

import hypothesis
import pytest
import torch

from flashlatte.runtime import dispatch

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, max_examples=20, database=None)
hypothesis.settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs = {
        "gpu": (torch.cuda.is_available(), "needs a CUDA GPU"),
        "interpreter": (dispatch.interpreting(), "needs TRITON_INTERPRET=1"),
    }
    for item in items:
        for marker, (available, reason) in needs.items():
            if item.get_closest_marker(marker) and not available:
                item.add_marker(pytest.mark.skip(reason=reason))
