# SPDX-License-Identifier: Apache-2.0
"""Convert a recording to a Parquet file: a row for each event of each workload in each reading."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from typing import Any, BinaryIO

import msgspec

from resctrlctl.base.errors import CommandError
from resctrlctl.live.recording import AnyLine, Header, Reading, Used
from resctrlmond.resctrl.errors import printable

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise CommandError(
        f"cannot write Parquet: pyarrow cannot be imported: {error}. Install python3-pyarrow, "
        "which Debian 13 does not have; or run 'pip install resctrlmond[parquet]' in a virtual environment; or "
        "record without --parquet"
    ) from error

_TIME = pa.timestamp("us", tz="UTC")
# The most digits of a Parquet decimal in 16 bytes, and more decimals than the kernel prints (6 for energy).
_NUMBER = pa.decimal128(38, 9)
_COLUMNS = (
    ("reading", _TIME),
    ("key", pa.string()),
    ("generation", pa.int64()),
    ("name", pa.string()),
    ("state", pa.string()),
    ("readAt", _TIME),
    ("createdAt", _TIME),
    ("completedAt", _TIME),
    ("error", pa.string()),
    ("event", pa.string()),
    ("value", _NUMBER),
    ("quality", pa.string()),
    ("level", _NUMBER),
)
# Rows that are converted at once: some MiB.
_BATCH = 20_000


def convert(lines: str, path: str) -> None:
    """Write the recording in the file ``lines`` to ``path``. Raises CommandError if that file cannot be written."""
    with open(lines, "rb") as file:
        header = msgspec.json.decode(file.readline(), type=Header)
        schema = pa.schema(_COLUMNS, metadata={"resctrlctl": msgspec.json.encode(header)})
        try:
            # As that of the lines: an existing file keeps its mode.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as sink, pq.ParquetWriter(sink, schema) as writer:
                rows = _rows(file)
                while batch := list(itertools.islice(rows, _BATCH)):
                    columns = zip(zip(*batch, strict=True), _COLUMNS, strict=True)
                    writer.write_table(pa.table([pa.array(values, of) for values, (_, of) in columns], schema=schema))
        except (OSError, pa.ArrowException) as error:
            reason = getattr(error, "strerror", None) or error
            raise CommandError(
                f"cannot write {printable(path)}: {reason}. The recording is kept as lines in {printable(lines)}"
            ) from error


def _rows(file: BinaryIO) -> Iterator[tuple[Any, ...]]:
    for line in map(msgspec.json.Decoder(AnyLine).decode, file):
        if isinstance(line, Reading):
            at = _time(line.read_at)
            for used in line.workloads:
                yield from _rows_of(used, at)


def _rows_of(used: Used, at: datetime | None) -> Iterator[tuple[Any, ...]]:
    """Yield a row for each event; one without an event if the workload has no figures."""
    of_workload = (
        at,
        used.key,
        used.generation,
        used.name,
        used.state,
        _time(used.read_at),
        _time(used.created_at),
        _time(used.completed_at),
        used.error,
    )
    events = sorted(used.totals.keys() | used.levels.keys())
    for event in events:
        total, level = used.totals.get(event), used.levels.get(event)
        value = None if total is None else _number(total.value)
        yield (*of_workload, event, value, None if total is None else total.quality, _number(level))
    if not events:
        yield (*of_workload, None, None, None, None)


def _number(text: str | None) -> Decimal | None:
    return None if text is None else Decimal(text)


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
