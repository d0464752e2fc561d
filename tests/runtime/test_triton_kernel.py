import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from flashlatte.runtime.triton_kernel import Kernel, launching


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("form", ["in order", "by name", "in a tuple"])
def test_a_launch_is_on_its_tensors_device(monkeypatch: pytest.MonkeyPatch, device: str, form: str) -> None:
    current = [0]
    launched: list[int] = []

    @contextlib.contextmanager
    def made_current(expected: torch.device) -> Any:
        before, current[0] = current[0], expected.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", made_current)
    jitted = SimpleNamespace(arg_names=["count", "host", "x"], run=lambda *_, **__: launched.append(current[0]))
    gpus_tensor = type("GPUsTensor", (torch.Tensor,), {"device": torch.device(device)})
    host, x = torch.empty(4), torch.empty(4).as_subclass(gpus_tensor)
    if form == "by name":
        Kernel(jitted)[(1,)](count=3, host=host, x=x)
    else:
        Kernel(jitted)[(1,)](3, host, (0, x) if form == "in a tuple" else x)
    assert launched == [torch.device(device).index]
    assert current == [0]


@pytest.mark.parametrize(("options", "fused"), [({}, True), ({"enable_fp_fusion": False}, False)])
def test_whether_products_and_sums_join_is_no_default_of_tritons(options: dict[str, bool], fused: bool) -> None:
    given: list[Any] = []
    jitted = SimpleNamespace(arg_names=["x"], run=lambda *_, **kwargs: given.append(kwargs["enable_fp_fusion"]))
    Kernel(jitted)[(1,)](torch.empty(4), **options)
    with launching(lambda _, args, kwargs: given.append(kwargs["enable_fp_fusion"])):
        Kernel(jitted)[(1,)](torch.empty(4), **options)
    assert given == [fused, fused]
