"""Build the wheel, check its contents, and use it with torch and triton only.

Nothing is installed: a folder has the content of the wheel, and links to this environment's copies of the packages that
it requires, directly or indirectly. Packages of extras are not included, so that importing one fails.
"""

from __future__ import annotations

import importlib.metadata as metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "wheel"
# Entry points of plugins, and of the command.
ENTRY_POINTS = ("console_scripts", "sglang.srt.plugins", "vllm.general_plugins", "vllm.platform_plugins")
EXPECTED = ("flashlatte/py.typed", "flashlatte/kv_cache/__init__.pyi", "flashlatte/demo/prompt.txt")

USE = f"""
import contextlib, importlib.metadata, importlib.util, io, torch, flashlatte
entry_points = importlib.metadata.distribution("flashlatte").entry_points
assert sorted(entry_points.groups) == {sorted(ENTRY_POINTS)}, entry_points
for entry_point in entry_points:
    assert callable(entry_point.load()), entry_point
for name in flashlatte.__all__:
    getattr(flashlatte, name)
import flashlatte.integrations.transformers
extras = ("transformers", "rich", "pandas", "starlette", "uvicorn", "vllm", "sglang")
absent = [name for name in extras if importlib.util.find_spec(name) is not None]
assert not absent, f"{{absent}} are here, and should not be"
cache = flashlatte.kv_cache.allocate("bf16", num_pages=2, page_size=64)
q = torch.randn(1, 1, 16, 576).bfloat16()
out, _ = flashlatte.dense_decode(q, cache, torch.tensor([[1]]), torch.tensor([64]))
assert out.shape == (1, 1, 16, 512), out.shape
from flashlatte.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    assert main(["doctor"]) == 0
"""


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    wheel = build()
    site = FOLDER / "site"
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        content.extractall(site)
        fields = content.read(next(name for name in names if name.endswith("METADATA"))).decode()
    check_content(names, fields)
    for package in closure("torch", "triton"):
        link(package, site)
    subprocess.run([sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(site)!r})\n{USE}"], check=True)
    print(f"{wheel.name} is complete, and works beside torch and triton alone")


def build() -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*command, "--wheel-dir", str(FOLDER), str(ROOT)], check=True)
    (wheel,) = FOLDER.glob("*.whl")
    return wheel


def check_content(names: list[str], fields: str) -> None:
    missing = [name for name in EXPECTED if name not in names]
    stray = [name for name in names if not re.match(r"flashlatte(-[^/]*\.dist-info)?/", name)]
    assert not missing, f"the wheel lacks {missing}"
    assert not stray, f"the wheel has files outside of the package: {stray}"
    for field in ("License-Expression: MIT", "Project-URL: Source", "Author: The FlashLatte authors"):
        assert field in fields, f"the wheel's metadata lacks {field!r}"


def closure(*roots: str) -> dict[str, metadata.Distribution]:
    """The installed distributions of these names, and their requirements on this platform, without extras."""
    found: dict[str, metadata.Distribution] = {}
    wanted = list(roots)
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # required on other platforms only
        lines = [line for line in found[name].requires or [] if "extra ==" not in line]
        wanted += [re.match(r"[\w.-]+", line).group() for line in lines]  # pyright: ignore[reportOptionalMemberAccess]
    return found


def link(package: str, site: Path) -> None:
    for file in metadata.distribution(package).files or []:
        first = file.parts[0]
        if first not in ("..", "__pycache__") and not (site / first).exists():
            (site / first).symlink_to(Path(str(file.locate())).parents[len(file.parts) - 1] / first)


if __name__ == "__main__":
    main()
