"""The package: import time, its version, and visibility of its types."""

import subprocess
import sys

import pytest
from support.isolation import TESTS

import flashlatte

# Modules that take as long to import as torch itself, and those that an operation does not need before it runs.
HEAVY = ("torch._dynamo", "torch._inductor", "sympy", "triton", "hypothesis", "transformers", "rich")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def newly_imported(statement: str, before: str) -> set[str]:
    """The modules that a statement imports in a process that ran ``before``."""
    code = f"import sys\n{before}\nold = set(sys.modules)\n{statement}\nprint(*sorted(set(sys.modules) - old))"
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    # The statement's own output comes first.
    return set(done.stdout.splitlines()[-1].split())


def test_public_names_import_no_heavy_package():
    names = sorted(set(flashlatte.__all__) - {"integrations"})
    statement = f"import flashlatte.integrations.transformers; [getattr(flashlatte, name) for name in {names}]"
    imported = newly_imported(statement, "import torch")
    assert "flashlatte.runtime.lazy" in imported
    assert not imported & set(HEAVY)


def test_the_package_and_its_help_do_not_import_torch():
    assert "torch" not in newly_imported("import flashlatte", "")
    commands = ("doctor", "bench", "demo", "generate", "serve")
    for arguments in (["--help"], ["--version"], *([command, "--help"] for command in commands)):
        code = (
            f"from flashlatte import cli\ntry: cli.main({arguments})\nexcept SystemExit as exit: assert exit.code == 0"
        )
        assert "torch" not in newly_imported(code, ""), arguments


@pytest.mark.parametrize("module", ["flashlatte", "flashlatte.cli"])
def test_version_on_the_command_line(module):
    done = run("-m", module, "--version")
    assert (done.returncode, done.stdout) == (0, f"flashlatte {flashlatte.__version__}\n")


def test_names_that_do_not_exist():
    with pytest.raises(AttributeError, match="module 'flashlatte' has no attribute 'espresso'"):
        flashlatte.espresso  # type: ignore[attr-defined]  # noqa: B018  # pyright: ignore


CONCURRENT_IMPORTS = """
import importlib, itertools, random, sys
sys.path.insert(0, TESTS)
import torch
from support.threads import at_the_same_time
import flashlatte
packages = [*flashlatte._PACKAGES, "engine", "layers.v4", "layers.v41", "integrations.transformers"]
modules = [*(f"flashlatte.{name}" for name in packages), *(f"flashlatte.ops.{name}" for name in flashlatte._OPERATIONS)]
errors = []

def work(number):
    order = random.Random(8 * SEED + number).sample([*modules, *flashlatte.__all__], 8)
    for name in itertools.islice(itertools.cycle(order), 40):
        try:
            found = importlib.import_module(name) if "." in name else getattr(flashlatte, name)
            for attribute in getattr(found, "__all__", ()):
                getattr(found, attribute)
        except Exception as error:
            errors.append(f"{name}: {error!r}")

at_the_same_time(work)
assert not errors, errors
"""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 12))])
def test_threads_import_at_the_same_time(seed):
    done = run("-c", CONCURRENT_IMPORTS.replace("SEED", str(seed)).replace("TESTS", repr(TESTS)))
    assert done.returncode == 0, done.stderr


USER_SCRIPT = """
import torch
import flashlatte
from flashlatte import dense_decode, flash_mla, kv_cache
from flashlatte.layers import MLAAttention, MLAConfig

def attend(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    out, lse = dense_decode(q, cache, table, lengths, causal=True)
    return out

pages: torch.Tensor = kv_cache.allocate("bf16", 4, 64)
layer: MLAAttention = flashlatte.layers.MLAAttention(MLAConfig(64, 4))
version: str = flash_mla.__version__
"""
# Each line is one mistake that a type checker must see.
MISTAKES = """
import flashlatte
from flashlatte import dense_decode, kv_cache
flashlatte.espresso
wrong: int = kv_cache.allocate("bf16", 4, 64)
dense_decode(1, 2, 3, 4)
"""


@pytest.mark.full
def test_type_checkers_see_the_package(tmp_path):
    pyright = pytest.importorskip("pyright", reason="pyright is in the extra 'dev'")
    (tmp_path / "right.py").write_text(USER_SCRIPT)
    (tmp_path / "wrong.py").write_text(MISTAKES)
    (tmp_path / "pyrightconfig.json").write_text("{}")
    done = pyright.run(
        "--pythonpath", sys.executable, "-p", str(tmp_path), capture_output=True, text=True, env=None, cwd=tmp_path
    )
    errors = [line for line in done.stdout.splitlines() if " error:" in line]
    assert not [line for line in errors if "right.py" in line], done.stdout
    lines = {int(line.split(".py:")[1].split(":")[0]) for line in errors if "wrong.py" in line}
    assert lines == {4, 5, 6}, done.stdout
