from __future__ import annotations

from types import ModuleType
from unittest import mock

from support import isolation


def test_functions_of_tests_and_mocks_are_found() -> None:
    module = ModuleType("flashlatte.module")
    vars(module).update(number=1, kind=int, other=isolation.Path, replaced=lambda: None, mocked=mock.Mock())
    assert set(isolation.functions_of_tests([module])) == {"flashlatte.module.replaced", "flashlatte.module.mocked"}
