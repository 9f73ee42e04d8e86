"""Read what W&B and trackio store on this machine."""

import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32768  # bytes per block of a W&B file


def wandb_records(path: Path) -> Iterator[Any]:
    """Iterate over a run's file: protobuf records in the block format of LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, offset, pending = path.read_bytes(), 7, b""  # 7: the file header
    while offset + 7 <= len(data):
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        pending += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        room = BLOCK - offset % BLOCK
        offset += room if room < 7 else 0  # too short for a header: padding
        if kind in (1, 4):  # a full record, or its last fragment
            yield Record.FromString(pending)
            pending = b""


def wandb_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's history."""
    rows = (_values(record.history.item) for record in wandb_records(path))
    return [row for row in rows if row]


def wandb_summary(path: Path) -> dict[str, Any]:
    """Return what was set in a run's summary."""
    summary: dict[str, Any] = {}
    for record in wandb_records(path):
        summary |= _values(record.summary.update)
    return summary


def wandb_run(path: Path) -> Any:
    """Return the record of a run itself: id, project, group, tags."""
    return next(r.run for r in wandb_records(path) if r.WhichOneof("record_type") == "run")


def _values(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def trackio_rows(project: str) -> dict[int, dict[str, float]]:
    """Return the metrics of a project's only run by step. Raises if a step is there twice."""
    from trackio.utils import TRACKIO_DIR

    with sqlite3.connect(TRACKIO_DIR / f"{project}.db") as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
    database.close()
    assert len({step for step, _ in rows}) == len(rows), "a step was logged twice"
    return {step: json.loads(metrics) for step, metrics in rows}
