"""``flashlatte doctor --report`` on a GPU."""

from __future__ import annotations

import pytest

from flashlatte.doctor import cases, hardware

pytestmark = pytest.mark.gpu


def test_every_case_is_right_and_timed():
    report = hardware.collect()
    assert [entry for entry in report["cases"] if entry["status"] != "ok"] == []
    assert len(report["cases"]) >= len(cases.CASES)
    assert all(entry["microseconds"] > 0 for entry in report["cases"])
    assert report["ceilings"]["status"] == "ok"
    assert report["environment"]["compute_capability"]
