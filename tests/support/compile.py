"""Compiles Triton kernels for GPUs that need not be present, and reads properties of the machine code."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from support.loops import loops
from support.stack_pointer import stack_pointer_as_number
from support.uniform_registers import read_before_written
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import create_function_from_signature, mangle_type

from flashlatte.runtime.kernel_records import flat_records

# Maximum shared memory of a program, in bytes, by compute capability.
SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}

AMD_SHARED_BYTES = 65_536

_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Compiled:
    """Properties of a kernel's machine code.

    Attributes:
        registers: registers per thread.
        stack: bytes of local memory per thread.
        shared: bytes of shared memory.
        ttgir: the kernel in Triton's GPU dialect.
    """

    name: str
    registers: int
    stack: int
    shared: int
    ttgir: str = field(repr=False)
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)

    @functools.cached_property
    def sass(self) -> str:
        """The disassembly. It takes a fifth of a second for the smallest kernel."""
        sass = _disassemble(self.cubin)
        unwritten = read_before_written(sass)
        assert not unwritten, f"{self.name} reads registers that nothing has written: {unwritten[:4]}"
        as_number = stack_pointer_as_number(sass)
        assert not as_number, f"{self.name} reads the stack pointer where a number belongs: {as_number[:4]}"
        return sass

    @property
    def spills(self) -> int:
        """Instructions that store to or load from local memory."""
        return self._count(r"(?:STL|LDL)") if self.stack else 0

    @property
    def hgmma(self) -> int:
        """Tensor-core instructions of a warpgroup (Hopper)."""
        return self._count("HGMMA") if "wgmma" in self.ptx else 0

    @property
    def hmma(self) -> int:
        """Tensor-core instructions of a warp."""
        return self._count("HMMA") if "mma.sync" in self.ptx else 0

    @property
    def waits(self) -> int:
        """Waits for tensor cores, on Hopper."""
        return self._count(r"WARPGROUP\.DEPBAR") if "wgmma" in self.ptx else 0

    @property
    def async_copies(self) -> int:
        """16-byte copies from global to shared memory that bypass registers."""
        return self._count(r"LDGSTS\.E\.[A-Z.0-9]*128")

    def _count(self, instruction: str) -> int:
        return len(re.findall(rf"\b{instruction}\b", self.sass))

    def __str__(self) -> str:
        return (
            f"registers {self.registers}, spills {self.spills}, shared {self.shared}, HGMMA {self.hgmma}, "
            f"HMMA {self.hmma}, waits {self.waits}, LDGSTS.128 {self.async_copies}"
        )


def compile_triton(
    fn: Any,
    signature: Mapping[str, Any],
    constexprs: Mapping[str, Any],
    arch: int,
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    unaligned: tuple[str, ...] = (),
    **options: Any,
) -> Compiled:
    """Compile the ``triton.jit`` function ``fn`` for compute capability ``arch`` (90 for 9.0).

    Args:
        signature: type of each run-time argument, "*bf16" or "i32", or a tuple of them; the order is that of ``fn``.
        constexprs: value of each ``tl.constexpr``, and None for a pointer that is not passed.
        unaligned: pointers that are not known to be divisible by 16 bytes.
    """
    compiled = triton.compile(
        _source(jit_function(fn), signature, constexprs, unaligned),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True, **options},
    )
    return _read(compiled)


def _source(
    fn: Any, signature: Mapping[str, Any], constexprs: Mapping[str, Any], unaligned: tuple[str, ...] = ()
) -> ASTSource:
    names = [parameter.name for parameter in fn.params]
    types = {name: "constexpr" if name in constexprs else signature[name] for name in names}
    values = {(names.index(name),): value for name, value in constexprs.items()}
    aligned = {
        path: [["tt.divisibility", 16]]
        for position, name in enumerate(names)
        if name not in unaligned
        for path, type_ in _leaves((position,), types[name])
        if type_.startswith("*")
    }
    return ASTSource(fn, types, values, aligned)


@dataclass(frozen=True)
class Launch:
    """One recorded launch of a kernel: its grid, and its arguments by name."""

    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]


class Recorder:
    """Fake kernel that records its launches, so that exactly the variants that a launcher launches are compiled."""

    def __init__(self, fn: Any) -> None:
        self.fn = jit_function(fn)
        self._records, self._same = getattr(fn, "records", {}), getattr(fn, "same", {})
        self.arg_names = [parameter.name for parameter in self.fn.params]
        self.launches: list[Launch] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return functools.partial(self._record, grid)

    def _record(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        arguments = dict(zip(self.arg_names, flat_records(self._records, self._same, args), strict=False))
        options = {name: kwargs.pop(name) for name in list(kwargs) if name not in self.arg_names}
        self.launches.append(Launch(grid, arguments | kwargs, options))


def jit_function(fn: Any) -> Any:
    """The ``JITFunction`` that Triton compiles for a kernel."""
    return getattr(fn, "jitted", fn)


def compile_launch(fn: Any, launch: Launch, arch: int) -> Compiled:
    """Compile the variant of ``fn`` that a recorded launch runs."""
    fn = jit_function(fn)
    return compile_triton(fn, *_arguments(fn, launch), arch, **launch.options)


_GLUON_CODE: dict[str, Compiled] = {}


def compile_gluon(fn: Any, launch: Launch) -> Compiled:
    """Compile the variant of a Gluon kernel that a recorded launch runs on Hopper, once for all tests."""
    from triton.experimental.gluon._runtime import GluonASTSource

    fn = jit_function(fn)
    key = f"{fn.__name__} {variant_key(fn, launch)}"
    if key not in _GLUON_CODE:
        target = GPUTarget("cuda", 90, 32)
        backend = make_backend(target)
        binder = create_function_from_signature(fn.signature, fn.params, backend)
        bound, specialization, options = binder(**launch.arguments, **launch.options)
        options, signature, constexprs, attributes = fn._pack_args(
            backend, dict(launch.options), bound, specialization, options
        )
        source = GluonASTSource(fn, signature, constexprs, attributes)
        _GLUON_CODE[key] = _read(triton.compile(source, target=target, options=options.__dict__))
    return _GLUON_CODE[key]


def amd_shared_bytes(fn: Any, launch: Launch) -> int:
    """Compile the variant of ``fn`` of a recorded launch for an MI300; returns its bytes of shared memory."""
    target = GPUTarget("hip", "gfx942", 64)
    fn = jit_function(fn)
    compiled = triton.compile(_source(fn, *_arguments(fn, launch)), target=target, options=launch.options)
    return compiled.metadata.shared


def _arguments(fn: Any, launch: Launch) -> tuple[dict[str, Any], dict[str, Any]]:
    """The types of a launch's run-time arguments, and its constants."""
    signature: dict[str, Any] = {}
    constexprs: dict[str, Any] = {}
    for parameter in fn.params:
        value = launch.arguments[parameter.name]
        # Triton specializes on None, and on 1 if the parameter allows it.
        specialized = value is None or (type(value) is int and value == 1 and not parameter.do_not_specialize)
        if parameter.is_constexpr or specialized:
            constexprs[parameter.name] = value
        elif isinstance(value, (torch.Tensor, tuple)) or hasattr(value, "block_shape"):
            signature[parameter.name] = _type_of(value)
        else:
            signature[parameter.name] = parameter.annotation_type or mangle_type(value)
    return signature, constexprs


def _type_of(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_type_of(entry) for entry in value)
    return _TYPES[value.dtype] if isinstance(value, torch.Tensor) else mangle_type(value)


def _leaves(path: tuple[int, ...], type_: Any) -> Iterator[tuple[tuple[int, ...], str]]:
    if isinstance(type_, tuple):
        for index, entry in enumerate(type_):
            yield from _leaves((*path, index), entry)
    else:
        yield path, type_


def variant_key(fn: Any, launch: Launch) -> str:
    """The key of a launch in Triton's cache of compiled kernels."""
    fn = jit_function(fn)
    binder = create_function_from_signature(fn.signature, fn.params, make_backend(GPUTarget("cuda", 90, 32)))
    _, specialization, options = binder(**launch.arguments, **launch.options)
    return f"{specialization}{options}"


def unused_mbarriers(ttgir: str) -> set[str]:
    """mbarriers that are initialized and otherwise unused.

    Triton reuses their memory without invalidating them (``hopper.barriers.allocate_mbarrier``).
    """
    view = r"(%\S+) = ttg\.memdesc_(?:index|subslice|reinterpret|trans) (%[^\s\[,]+)"
    whole = dict(re.findall(view, ttgir))

    def allocation(name: str) -> str:
        return allocation(whole[name]) if name in whole else name

    initialized, used = set(), set()
    for line in ttgir.splitlines():
        names = {allocation(name) for name in re.findall(r"%[\w#]+", line)}
        if "ttng.init_barrier" in line:
            initialized |= names
        elif not re.search(rf"{view}|ttg\.local_alloc", line):
            used |= names
    return initialized - used


def loop_spills(sass: str) -> int:
    """Number of spill instructions in the innermost loop with matrix products."""
    bodies = [body for body in loops(sass) if any("MMA" in one for one in body)]
    return _spills(min(bodies, key=len))


def cast_loop_spills(sass: str) -> int:
    """Number of spill instructions in the loop that casts e4m3: the innermost one with all bf16x2 products."""
    bodies = [(sum("HMUL2" in one for one in body), body) for body in loops(sass)]
    most = max(count for count, _ in bodies)
    assert most, "no loop casts"
    return _spills(min((body for count, body in bodies if count == most), key=len))


def spills_in_loops(sass: str) -> int:
    """Number of spill instructions in the loop that has the most."""
    return max((_spills(body) for body in loops(sass)), default=0)


def _spills(body: list[str]) -> int:
    return sum(bool(re.search(r"\b(?:STL|LDL)\b", one)) for one in body)


def _read(compiled: Any) -> Compiled:
    unused = unused_mbarriers(compiled.asm["ttgir"])
    assert not unused, f"{compiled.name} initializes mbarriers that it does not use: {unused}"
    registers, stack = _resources(compiled.asm["cubin"])
    ttgir, ptx, cubin = (compiled.asm[stage] for stage in ("ttgir", "ptx", "cubin"))
    code = Compiled(compiled.name, registers, stack, compiled.metadata.shared, ttgir, ptx, cubin)
    # ptxas's defects, which reading sass looks for, are in products and in conversions from e4m3.
    if re.search("mma|e4m3", ptx):
        _ = code.sass
    return code


def _disassemble(cubin: bytes) -> str:
    """The disassembly. It is stored in Triton's cache, because nvdisasm is the slowest step for a cached kernel."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "nvdisasm")
    # Code sections only, and without nvdisasm's own analysis.
    options = ("-c", "-ndf")
    key = hashlib.sha256(cubin + " ".join((triton.__version__, *options)).encode()).hexdigest()
    cache = get_cache_manager(key)
    if (kept := cache.get_file("kernel.sass")) is not None:
        return Path(kept).read_text()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True).stdout
    cache.put(sass, "kernel.sass", binary=False)
    return sass


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of the stack, of a thread."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr)[-1]
    return int(registers), int(stack)
