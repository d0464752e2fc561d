"""Pack vLLM for a Hopper GPU machine that has PyTorch, Triton and transformers, and no network.

    python .ci/vllm_archive.py FILE.tar.xz

The archive has vLLM's Python files, its compiled extensions with code for sm_90 only, and the Python packages that the
machine lacks. FlashAttention-3 keeps bf16 kernels of MLA's head dims. On the machine, unpack it into a folder, and
start Python with PYTHONPATH=FOLDER:CHECKOUT. Prints each part's size. Exit code 3: a wheel cannot be downloaded here.

vLLM 0.33 pins PyTorch 2.14. Its extensions use PyTorch's stable ABI, and also load in 2.11.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import fatbins
import tomllib

ROOT = Path(__file__).resolve().parents[1]
VLLM = "vllm==0.33.0"
# What vLLM imports to run a model and the usual image of PyTorch lacks. Versions that were tested together.
PACKAGES = (
    "annotated-types==0.8.0",
    "apache-tvm-ffi==0.1.15.post2",
    "cachetools==8.0.2",
    "cbor2==6.3.0",
    "compressed-tensors==0.17.0",
    "fastapi==0.165.0",
    "httpx2==2.16.2",
    "llguidance==1.9.1",
    "loguru==0.7.3",
    "msgspec==0.22.0",
    "openai==3.57.0",
    "opentelemetry-api==1.45.2",
    "opentelemetry-exporter-otlp-proto-common==1.45.2",
    "opentelemetry-proto==1.45.2",
    "opentelemetry-sdk==1.45.2",
    "opentelemetry-semantic-conventions==0.66b2",
    "oss-harmony==0.0.11",
    "partial-json-parser==0.2.1.1.post7",
    "pybase64==1.5.1",
    "pydantic==2.14.4",
    "pydantic-core==2.50.5",
    "pyzmq==27.3.0",
    "sniffio==1.3.1",
    "starlette==1.10.0",
    "typing-inspection==0.4.5",
    "xgrammar==0.2.9",
)
PYTHON, ABIS = "3.12", ("cp312", "abi3", "none")
GLIBCS = (39, 35, 34, 31, 28, 27, 24, 17)
ARCHITECTURE = 90
# Mangled template arguments of FlashAttention-3's main loop: head dims 64 and 512 (decode), 192 and 128 (prefill).
OTHER_KERNELS = re.compile(
    rb"FlashAttnFwdSm90INS1_25CollectiveMainloopFwdSm90I(?!\w{0,120}(?:Li64EEESA_SA_EEELi512|Li192EEEEEELi128)"
    rb"ENS_10bfloat16_t)"
)
EXTENSIONS = {
    "vllm/_C_stable_libtorch.abi3.so": None,
    "vllm/_moe_C_stable_libtorch.abi3.so": None,
    "vllm/_flashmla_C.abi3.so": None,
    "vllm/_flashmla_extension_C.abi3.so": None,
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": OTHER_KERNELS,
}
# CUDA sources that are compiled at run time, for kernels that MLA without an indexer does not use.
LEFT_OUT = ("vllm/third_party/deep_gemm/", "vllm/third_party/fmha_sm100/", "vllm/vllm-rs")
MIB = 1 << 20
CANNOT = 3


def download(folder: Path) -> list[Path]:
    """The wheels of vLLM and PACKAGES for the machine, not for this one."""
    options = ["--no-deps", "--only-binary", ":all:", "--implementation", "cp", "--python-version", PYTHON]
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBCS] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    options += [word for platform in platforms for word in ("--platform", platform)]
    options += [word for abi in ABIS for word in ("--abi", abi)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", *options]
    subprocess.run([*pip, "--dest", str(folder), VLLM, *PACKAGES], check=True)
    return sorted(folder.glob("*.whl"))


def unpack(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if wanted(wheel, name)]
        archive.extractall(target, names)


def wanted(wheel: Path, name: str) -> bool:
    if not wheel.name.startswith("vllm-"):
        return True
    return (not name.endswith(".so") or name in EXTENSIONS) and not name.startswith(LEFT_OUT)


def strip_extensions(target: Path) -> None:
    for name, unwanted in EXTENSIONS.items():
        file = target / name
        stripped, kept = fatbins.strip(file.read_bytes(), ARCHITECTURE, unwanted)
        file.write_bytes(stripped)
        print(
            f"{name}: {len(stripped) / MIB:.1f} MiB, of which {kept / MIB:.1f} are machine code for sm_{ARCHITECTURE}"
        )


def register_plugin(target: Path) -> None:
    """Metadata of FlashLatte, in which vLLM finds the plugin; the package itself is the checkout's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = target / "flashlatte.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: flashlatte\nVersion: 0+checkout\n")
    groups = project["entry-points"].items()
    lines = [line for group, points in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")


def main(file: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        wheels, target = Path(folder) / "wheels", Path(folder) / "packages"
        try:
            found = download(wheels)
        except subprocess.CalledProcessError:
            print("a wheel cannot be downloaded here", file=sys.stderr)
            return CANNOT
        for wheel in found:
            unpack(wheel, target)
        strip_extensions(target)
        register_plugin(target)
        with tarfile.open(file, "w:xz") as archive:
            archive.add(target, ".")
    print(f"{file}: {file.stat().st_size / MIB:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
