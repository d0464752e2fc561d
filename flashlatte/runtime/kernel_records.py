"""Kernels whose parameters are records: named tuples of pointers and scalars, which Triton takes one by one.

A kernel states ``query: Query``, and a launch passes a ``Query``. Triton would take the tuple too, but as one
parameter: it would specialize on the scalars inside, and compile a variant for each stride of 1 or beyond 2^31. This
module generates the function that Triton compiles: it has a parameter for each field, makes the records, and calls the
kernel's body, which Triton inlines.

The types below annotate fields. They are Any for type checkers, because a field holds a Python value in a launch and a
Triton value in a kernel.
"""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

# A tensor, a TMA descriptor, or None.
Pointer: TypeAlias = Any
# A pointer of any alignment that is accessed element by element, such as lengths in the middle of a buffer.
ElementPointer: TypeAlias = Any
# Run-time values: Triton does not specialize on them.
Int32: TypeAlias = Any
Int64: TypeAlias = Any
Float32: TypeAlias = Any
# A compile-time value if it is None, a run-time value below 2^31 otherwise.
OptionalInt32: TypeAlias = Any
Constant: TypeAlias = Any

_SCALARS = {"Int32": "int32", "Int64": "int64", "Float32": "float32"}
_WITHOUT_TYPE = ("", "Pointer", "ElementPointer", "OptionalInt32")
_KINDS = (*_WITHOUT_TYPE, *_SCALARS, *_SCALARS.values(), "Constant", "constexpr")
_TUPLE_ATTRIBUTES = ("type", "values")
# Names by which the generated function refers to Triton's types and to the kernel's body.
_LANGUAGE, _BODY = "tl", "body"


@dataclass(frozen=True)
class Parameter:
    """A parameter of the generated function.

    Attributes:
        name: <parameter of the kernel>_<field>, or the parameter itself if it is not a record.
        kind: the last part of the annotation: a type of this module, of Triton, or "".
    """

    name: str
    kind: str

    @property
    def declaration(self) -> str:
        kind = "constexpr" if self.kind == "Constant" else _SCALARS.get(self.kind, self.kind)
        return self.name if kind in _WITHOUT_TYPE else f"{self.name}: {_LANGUAGE}.{kind}"


def records_of(function: Callable[..., None]) -> dict[str, type[Any]]:
    """The record class of each parameter of a kernel that is annotated with one."""
    scope = vars(sys.modules[function.__module__])
    found = {name: _record(item.annotation, scope) for name, item in inspect.signature(function).parameters.items()}
    return {name: record for name, record in found.items() if record is not None}


def parameters_of(
    function: Callable[..., None], records: Mapping[str, type[Any]], same: Mapping[str, str]
) -> list[Parameter]:
    """The parameters of the generated function, or those of a kernel without records. ``same``: as in ``kernel``.

    Raises:
        TypeError: an annotation is neither a record nor a kind of argument, or a field has a name of Triton's.
    """
    parameters: list[Parameter] = []
    for name, item in inspect.signature(function).parameters.items():
        parameters += _fields(name, records[name]) if name in records else [Parameter(name, _kind(item.annotation))]
    for parameter in parameters:
        if parameter.kind not in _KINDS:
            raise TypeError(f"{parameter.name} of {function.__name__} must be a record, a scalar or a kind of pointer")
    return [parameter for parameter in parameters if parameter.name not in same]


def entry_of(
    function: Callable[..., None], records: Mapping[str, type[Any]], same: Mapping[str, str], body: Any
) -> Callable[..., None]:
    """The function that Triton compiles: makes ``records`` of its parameters and calls ``body``."""
    names: dict[str, Any] = {_LANGUAGE: sys.modules["triton.language"], _BODY: body}
    declarations = "".join(f"    {item.declaration},\n" for item in parameters_of(function, records, same))
    arguments = "".join(
        f"        {_construction(name, records[name], same, names) if name in records else name},\n"
        for name in inspect.signature(function).parameters
    )
    source = f"def {function.__name__}(\n{declarations}):\n    {_BODY}(\n{arguments}    )\n"
    # Triton reads the source of what it compiles.
    filename = f"<parameters of {function.__module__}.{function.__name__}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope = {"__name__": function.__module__, **names}
    exec(compile(source, filename, "exec"), scope)
    entry = scope[function.__name__]
    entry.__doc__ = function.__doc__
    return entry


def flat_records(records: Mapping[str, type[Any]], same: Mapping[str, str], args: Sequence[Any]) -> tuple[Any, ...]:
    """The fields of a launch's positional arguments, which are its records. A kernel without records takes any.

    Raises:
        TypeError: an argument is not the record that the kernel takes, or the number of positional arguments differs.
        ValueError: two fields of ``same`` differ.
    """
    if not records:
        return tuple(args)
    if len(args) != len(records):
        names = ", ".join(records)
        raise TypeError(f"a launch must pass {names}, and all else by name; got {len(args)} arguments without a name")
    fields: dict[str, Any] = {}
    for (name, record), value in zip(records.items(), args, strict=True):
        fields.update(_flatten(name, value, record))
    for name, other in same.items():
        if fields[name] != fields[other]:
            raise ValueError(f"{name} must be {other}, {fields[other]}, got {fields[name]}")
    return tuple(value for name, value in fields.items() if name not in same)


def _flatten(name: str, value: Any, record: type[Any]) -> Iterator[tuple[str, Any]]:
    """Names and values of a record's fields, in the order of the generated function's parameters.

    Raises:
        TypeError: ``value`` is not a ``record``.
    """
    if not isinstance(value, record):
        raise TypeError(f"{name} must be a {record.__name__}, got {type(value).__name__}")
    scope = vars(sys.modules[record.__module__])
    for field, item in zip(record._fields, value, strict=True):
        inner = _record(record.__annotations__[field], scope)
        if inner is None:
            yield f"{name}_{field}", item
        else:
            yield from _flatten(f"{name}_{field}", item, inner)


def _fields(prefix: str, record: type[Any]) -> Iterator[Parameter]:
    scope = vars(sys.modules[record.__module__])
    for field in record._fields:
        if field in _TUPLE_ATTRIBUTES:
            raise TypeError(
                f"{record.__name__} must have no field {field}: Triton's tuples have an attribute of that name"
            )
        annotation = record.__annotations__[field]
        inner = _record(annotation, scope)
        if inner is None:
            yield Parameter(f"{prefix}_{field}", _kind(annotation))
        else:
            yield from _fields(f"{prefix}_{field}", inner)


def _construction(prefix: str, record: type[Any], same: Mapping[str, str], names: dict[str, Any]) -> str:
    """The expression that makes a record of its fields' parameters. Adds the classes in it to ``names``."""
    if names.setdefault(record.__name__, record) is not record:
        raise TypeError(f"two records of a kernel are named {record.__name__}")
    scope = vars(sys.modules[record.__module__])
    arguments = []
    for field in record._fields:
        inner = _record(record.__annotations__[field], scope)
        name = f"{prefix}_{field}"
        arguments.append(same.get(name, name) if inner is None else _construction(name, inner, same, names))
    return f"{record.__name__}({', '.join(arguments)})"


def _record(annotation: Any, scope: Mapping[str, Any]) -> type[Any] | None:
    """The record that an annotation names, or None."""
    if isinstance(annotation, type):
        return annotation if hasattr(annotation, "_fields") else None
    text = _text(annotation)
    value = scope.get(text.split(".")[0])
    for part in text.split(".")[1:]:
        value = getattr(value, part, None)
    return value if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields") else None


def _kind(annotation: Any) -> str:
    kind = "" if annotation is inspect.Parameter.empty else _text(annotation).rpartition(".")[2]
    return "float32" if kind == "fp32" else kind  # str(tl.float32)


def _text(annotation: Any) -> str:
    """The text of an annotation. A named tuple keeps those of its fields as ``ForwardRef``."""
    if isinstance(annotation, type):
        return annotation.__name__
    return str(getattr(annotation, "__forward_arg__", annotation))
