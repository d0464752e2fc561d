"""Inline PTX of Hopper kernels: where it stands."""

from __future__ import annotations

from pathlib import Path

import flashlatte

ROOT = Path(flashlatte.__file__).parent
PTX = ROOT / "kernels" / "hopper" / "ptx"


def test_hopper_kernels_write_ptx_in_one_place():
    modules = [path for path in ROOT.rglob("*.py") if "hopper" in path.as_posix()]
    with_ptx = {path.parent for path in modules if "inline_asm_elementwise(" in path.read_text()}
    assert with_ptx == {PTX}
