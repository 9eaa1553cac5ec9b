"""Opens untrusted `.arrow` and parquet files: from memory, checked value by value before any of it is used.

Arrow trusts what it is given: offsets of a changed file point anywhere. Its own word for a file that cannot be
trusted is `validate(full=True)`, on buffers in memory, since a mapped file that shrinks kills the process.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...extras import need
from ..untrusted import LIMITS, CoresetFileError, reading

_MOST_ROWS = 64  # read at a time from parquet
_RECORD_BATCH = 3  # the kind of message in Arrow's Message.fbs


def read_table(path: Path, columns: Sequence[str]) -> Any:
    """A `pyarrow.Table` of those of the columns that are there."""
    pyarrow = need("pyarrow", extra="formats", what="Hugging Face dataset folders")
    with reading(path):
        read = _parquet if path.suffix == ".parquet" else _arrow
        batches, total, size = [], 0, path.stat().st_size
        schema, rows = read(path, columns)
        for batch in rows:
            batch.validate(full=True)
            total += batch.nbytes + 8 * batch.num_rows  # rows of nothing take no bytes, and may be any number
            LIMITS.check_unpacked(path, total, size)
            batches.append(batch)
        return pyarrow.Table.from_batches(batches, schema)


def _parquet(path: Path, columns: Sequence[str]) -> tuple[Any, Iterator[Any]]:
    parquet = need("pyarrow.parquet", extra="formats", what="parquet files")
    file = parquet.ParquetFile(path, memory_map=False, pre_buffer=False)
    about, size = file.metadata, path.stat().st_size
    groups = [about.row_group(i) for i in range(about.num_row_groups)]
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    LIMITS.check_unpacked(path, sum(max(8 * c.num_values, c.total_uncompressed_size) for c in chunks), size)
    names = [name for name in file.schema_arrow.names if name in columns]
    return _only(path, file.schema_arrow, names), file.iter_batches(
        batch_size=_rows_at_once(chunks), columns=names, use_threads=False
    )


def _rows_at_once(chunks: Sequence[Any]) -> int:
    """So few that they fit even if each is the whole of its column: one stored value may stand for any number of rows."""
    largest = max((chunk.total_uncompressed_size for chunk in chunks), default=0)
    return int(min(_MOST_ROWS, max(1, LIMITS.always_fine // max(1, largest))))


def _arrow(path: Path, columns: Sequence[str]) -> tuple[Any, Iterator[Any]]:
    """A stream, as `save_to_disk` writes it."""
    ipc = need("pyarrow.ipc", extra="formats", what="Arrow files")
    messages = iter(ipc.MessageReader.open_stream(path.read_bytes()))
    first = next(messages)
    if first.type != "schema":  # taking any other for one kills the process
        raise CoresetFileError(f"{path} is refused: an Arrow stream begins with a schema, this one with {first.type}")
    schema = ipc.read_schema(first)
    names = [name for name in schema.names if name in columns]

    def batches() -> Iterator[Any]:
        for message in messages:
            if message.type != "record batch" or _compressed(message.metadata.to_pybytes()):
                raise CoresetFileError(f"{path} is refused: only plain record batches are read, no {message.type}s")
            yield ipc.read_record_batch(message, schema).select(names)

    return _only(path, schema, names), batches()


def _only(path: Path, schema: Any, names: Sequence[str]) -> Any:
    if not names:
        raise CoresetFileError(f"{path} has no column of images or labels, it has {', '.join(schema.names[:20])}")
    pyarrow = need("pyarrow", extra="formats", what="Hugging Face dataset folders")
    return pyarrow.schema([schema.field(name) for name in names], schema.metadata)


def _compressed(message: bytes) -> bool:
    """True unless this is a record batch without compression, which unpacks to no more than it is."""
    table = struct.unpack_from("<I", message)[0]
    kind, header = _field(message, table, 1), _field(message, table, 2)
    if not kind or message[kind] != _RECORD_BATCH or not header:
        return True
    return _field(message, header + struct.unpack_from("<I", message, header)[0], 3) != 0


def _field(message: bytes, table: int, number: int) -> int:
    """Where a field of a flatbuffers table is, 0 if it is not there."""
    vtable = table - struct.unpack_from("<i", message, table)[0]
    size, entry = struct.unpack_from("<H", message, vtable)[0], 4 + 2 * number
    offset = struct.unpack_from("<H", message, vtable + entry)[0] if entry < size else 0
    return table + offset if offset else 0


def values(path: Path, column: Any) -> np.ndarray:
    """Numbers, or lists of lists of numbers of one shape, as an array `(n, ...)`."""
    chunks = [_chunk(path, chunk) for chunk in column.chunks]
    if not chunks:
        raise CoresetFileError(f"{path} has no rows")
    return np.concatenate(chunks)


def _chunk(path: Path, array: Any) -> np.ndarray:
    types = need("pyarrow.types", extra="formats", what="Hugging Face dataset folders")
    shape = [len(array)]
    while True:
        array = getattr(array, "storage", array)  # datasets' Array3D is an extension of nested lists
        if array.null_count:
            raise CoresetFileError(f"{path} has missing values")
        if not (types.is_list(array.type) or types.is_large_list(array.type) or types.is_fixed_size_list(array.type)):
            break
        if types.is_fixed_size_list(array.type):
            lengths = np.array([array.type.list_size])
        else:
            lengths = np.unique(array.value_lengths().to_numpy()) if len(array) else np.zeros(1, int)
        if len(lengths) != 1 or len(shape) >= LIMITS.dimensions:
            raise CoresetFileError(f"{path} has arrays of several shapes")
        shape.append(int(lengths[0]))
        array = array.flatten()
    kind = array.type
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise CoresetFileError(f"{path} has values of type {kind}, where numbers are needed")
    numbers: np.ndarray[Any, Any] = array.to_numpy(zero_copy_only=False)
    return numbers.reshape(shape)


def embedded(path: Path, column: Any) -> list[bytes] | None:
    """The bytes of each picture; None if the column is none of pictures. Where a path points to is never opened."""
    types = need("pyarrow.types", extra="formats", what="Hugging Face dataset folders")
    found: list[bytes | None] = []
    for chunk in column.chunks:
        array = getattr(chunk, "storage", chunk)
        if types.is_struct(array.type) and array.type.get_field_index("bytes") >= 0:
            array = array.field("bytes")
        if types.is_null(array.type) and len(array):
            found.append(None)
        elif not (types.is_binary(array.type) or types.is_large_binary(array.type)):
            return None
        else:
            found += array.to_pylist()
    missing = [number for number, data in enumerate(found) if data is None]
    if missing:
        raise CoresetFileError(
            f"{path} has no bytes for the picture in row {missing[0]}, at most a path or an address, which is not "
            "opened. Open the dataset where the pictures are and save it again: save_to_disk embeds them"
        )
    return [data for data in found if data is not None]
