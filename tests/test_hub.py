"""hub/build.py builds a kernel for the Hugging Face Hub that works without the package."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import flashlatte
from flashlatte import kv_cache

ROOT = Path(__file__).parents[1]
HUB = ROOT / "hub"
NAME = "_flashlatte_cpu_0a1b2c3"
# The loader of Hugging Face's ``kernels`` in short: a kernel is imported from its path, under a name of its own.
KERNELS = f"""
import importlib.util, sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "flashlatte":
            raise ImportError("the installed package is not to be imported")

def get_kernel(repo_id, *, version, trust_remote_code):
    assert repo_id == "flashlatte/flashlatte"
    assert version == {flashlatte.__version__.partition(".")[0]}
    sys.meta_path.insert(0, Refuses())
    spec = importlib.util.spec_from_file_location("{NAME}", INIT)
    module = sys.modules["{NAME}"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""
CONFTEST = """
def pytest_configure(config):
    config.addinivalue_line("markers", "kernels_ci: of the Hub's own CI")
"""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "built"
    subprocess.run([sys.executable, str(HUB / "build.py"), str(folder)], check=True, capture_output=True)
    return folder


def run(built: Path, *arguments: str, interpret: str = "0") -> str:
    """Run Python with the kernel's loader as ``kernels``, without the rest of this repository; returns its output."""
    stub = built.parent / "stub"
    stub.mkdir(exist_ok=True)
    init = built / "torch-ext" / "flashlatte" / "__init__.py"
    (stub / "kernels.py").write_text(f"INIT = {str(init)!r}\n{KERNELS}")
    (built / "tests" / "conftest.py").write_text(CONFTEST)
    environment = {**os.environ, "PYTHONPATH": str(stub), "TRITON_INTERPRET": interpret}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=built, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_layout_is_the_hubs(built):
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    assert {path.name for path in built.iterdir()} >= {"build.toml", "flake.nix", "CARD.md", "tests", "torch-ext"}
    build = tomllib.loads((built / "build.toml").read_text())
    assert build["general"]["name"] == "flashlatte"
    assert build["general"]["version"] == int(flashlatte.__version__.partition(".")[0])
    assert "torch-noarch" in build


def test_no_import_is_of_the_package_by_its_name(built):
    for path in (built / "torch-ext").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) flashlatte\b", path.read_text(), re.MULTILINE), path


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("import torch.nn, math\nfrom triton import language", None),
        ("def f():\n    import numpy as np\n    from transformers import x", "numpy, transformers"),
        ("import numpy\nfrom triton.runtime.interpreter import TensorHandle", None),
    ],
)
def test_imports_of_other_packages_are_refused(monkeypatch, text, refused):
    monkeypatch.syspath_prepend(str(HUB))
    build = load(HUB / "build.py")
    module = build.Module("flashlatte.water", text, is_package=False)
    if refused is None:
        build.check_imports("flashlatte.water", module)
    else:
        with pytest.raises(ValueError, match=f"^flashlatte.water imports {refused}, which"):
            build.check_imports("flashlatte.water", module)


def test_packages_above_the_operations_are_excluded(built):
    rooms = {path.stem for path in (built / "torch-ext" / "flashlatte").iterdir()}
    assert rooms == {"__init__", "_root", "kernels", "kv_cache", "ops", "runtime", "split_kv"}


def literals(tree: ast.AST, *kinds: type) -> list:
    """The constant lists or dicts of a module, in order."""
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def test_the_kernel_has_the_packages_operations(built):
    tree = ast.parse((built / "torch-ext" / "flashlatte" / "__init__.py").read_text())
    names = {constant.value for constant in literals(tree, ast.List)[0].elts}
    packages = {"deep_gemm", "distributed", "flash_mla", "flashinfer", "integrations", "layers"}
    assert names == set(flashlatte.__all__) - packages | {"flash_attn_func", "flash_attn_varlen_func"}
    declared = {constant.value for constant in literals(tree, ast.Dict)[0].keys}
    assert declared | set(kv_cache.__all__) == set(dir(kv_cache))


@pytest.mark.full
def test_every_implementation_is_in_the_kernel(built):
    code = f"""
import importlib, kernels, pkgutil, sys
module = kernels.get_kernel("flashlatte/flashlatte", version=0, trust_remote_code=True)
dispatch = sys.modules["{NAME}.runtime.dispatch"]
for found in pkgutil.walk_packages(sys.modules["{NAME}.ops"].__path__, "{NAME}.ops."):
    importlib.import_module(found.name)
for name in dir(module.kv_cache):
    getattr(module.kv_cache, name)
assert not [name for name in sys.modules if name.partition(".")[0] == "flashlatte"]
print(len(dispatch.operations()))
"""
    assert int(run(built, "-c", code)) > 20


@pytest.mark.full
def test_the_kernels_own_tests_pass_on_a_cpu(built):
    summary = run(built, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", interpret="1").splitlines()[-1]
    assert "passed" in summary
    assert "skipped" not in summary


@pytest.mark.full
@pytest.mark.parametrize("padding", [0, 3])
def test_transformers_calls_the_flash_attention_functions(monkeypatch, padding):
    """As for ``attn_implementation="flashlatte/flashlatte"``, against its own SDPA; a mask takes the path of varlen."""
    import torch
    from transformers import modeling_flash_attention_utils as flash

    entry = load(HUB / "entry.py")
    functions = entry.flash_attn_func, entry.flash_attn_varlen_func, None, flash._pad_input, flash._unpad_input
    monkeypatch.setattr(flash, "_lazy_imports", lambda *_, **__: functions)
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, 4, width, generator=generator).bfloat16() for width in (48, 48, 32))
    mask = torch.arange(9) >= torch.tensor([[padding], [0]])
    out = flash._flash_attention_forward(
        q, k, v, mask.long() if padding else None, 9, is_causal=True, attn_implementation="flashlatte/flashlatte"
    )
    visible = (torch.ones(9, 9).tril().bool() & mask[:, None])[:, None]
    by_head = [x.transpose(1, 2).float() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*by_head, attn_mask=visible).transpose(1, 2)
    torch.testing.assert_close(out[mask].float(), expected[mask], rtol=2e-2, atol=2e-2)


@pytest.fixture(scope="module")
def rewrite():
    return load(HUB / "rewrite.py")


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("cup.beans.arabica", "from cup.water import heat", "from ..water import heat"),
        ("cup.beans.arabica", "from cup import water", "from .. import water"),
        ("cup.water", "def f():\n    from cup.beans import (\n        a,\n    )", None),
        ("cup.water", "from cupboard import shelf", "from cupboard import shelf"),
        ("cup.water", "from .beans import a", "from .beans import a"),
        ("cup.water", "x = 'a cup of é'; from cup.beans import a", "x = 'a cup of é'; from .beans import a"),
    ],
)
def test_imports_are_rewritten(rewrite, name, before, after):
    expected = before.replace("cup.beans", ".beans") if after is None else after
    assert rewrite.Module(name, before, is_package=False).rewritten() == expected


def test_a_packages_imports_are_relative_to_itself(rewrite):
    assert rewrite.Module("cup", "from cup.beans import a", is_package=True).rewritten() == "from .beans import a"


def test_strings_that_are_module_paths_are_rewritten(rewrite):
    before = (
        '"""Of cup.beans."""\nfrom __future__ import annotations\n\né = ("cup.beans:a", f"cup.{1}:b", "cup", "cups")\n'
    )
    module = rewrite.Module("cup.water", before, is_package=False)
    assert module.paths == {"cup.beans", "cup"}
    text = module.rewritten()
    names: dict = {"__package__": "other", "__name__": "other.water"}
    assert "from ._root import ROOT as _ROOT" in text
    exec(text.replace("from ._root import ROOT as _ROOT", "_ROOT = 'other'"), names)
    assert names["é"] == ("other.beans:a", "other.1:b", "other", "cups")
    assert names["__doc__"] == "Of cup.beans."


@pytest.mark.parametrize("text", ["import cup.beans", "x = 'run python -m cup.beans now'"])
def test_unsupported_code_cannot_be_rewritten(rewrite, text):
    with pytest.raises(ValueError, match=r"^cup\.water, line 1"):
        rewrite.Module("cup.water", text, is_package=False)
