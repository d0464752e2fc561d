"""Block tables that callers of other libraries pass as slices of wider buffers."""

from __future__ import annotations

import torch
from torch._C import DisableTorchFunction

from flashlatte.runtime import checks


def whole_rows(block_table: torch.Tensor) -> torch.Tensor:
    """Extend a slice of a table's columns to the buffer's whole rows. Other tables are returned unchanged.

    FlashMLA and DeepGEMM find a row by the stride and read as many columns as the length needs, but operations clamp
    lengths to the table's width. SGLang captures CUDA graphs with lengths of 1 and a slice of one column, and replays
    them with other lengths, whose pages it writes to further columns of the buffer.
    """
    # Torch-function modes intercept attribute reads too.
    with DisableTorchFunction():
        if not checks.is_strided(block_table):
            return block_table
        shape = block_table.shape
        if len(shape) != 2 or block_table.stride(0) <= shape[1]:
            return block_table
        rows, columns = shape
        row_stride, column_stride = block_table.stride()
        if columns > 1 and column_stride != 1:
            return block_table
        width = row_stride
        # The storage may end before a whole last row does. torch.compile cannot trace this; as_strided raises there.
        if not torch.compiler.is_compiling():
            elements = block_table.untyped_storage().nbytes() // block_table.element_size()
            width = min(width, elements - block_table.storage_offset() - (rows - 1) * row_stride)
        # Equal if the storage ends with the table, less without storage: a table of no columns.
        return block_table.as_strided((rows, width), (row_stride, 1)) if width > columns else block_table
