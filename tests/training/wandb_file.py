"""Reads a W&B run file back: LevelDB's log format with W&B's header, each record a protobuf message."""

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEADER = struct.Struct("<4sHB")
IDENT, MAGIC, VERSION = b":W&B", 0xBEE1, 0
BLOCK = 32 * 1024
CHUNK = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class RunFile:
    """What a run file holds."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """History rows in the order of the file, W&B's own keys left out."""
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    """id, project, group, name, tags."""
    metrics: dict[str, str] = field(default_factory=dict)
    """The step axis of each pattern of names."""
    exit_code: int | None = None


def read_records(path: Path) -> Iterator[bytes]:
    """The records' bytes; the checksum of every chunk is verified."""
    content = path.read_bytes()
    assert HEADER.unpack_from(content) == (IDENT, MAGIC, VERSION), "this is no W&B run file"
    position, parts = HEADER.size, []
    while position < len(content):
        left = BLOCK - position % BLOCK
        if left < CHUNK.size:
            position += left  # a block's tail that is too short for a chunk is padding
            continue
        checksum, length, kind = CHUNK.unpack_from(content, position)
        start = position + CHUNK.size
        part = content[start : start + length]
        assert zlib.crc32(part, zlib.crc32(bytes([kind]))) == checksum, f"a broken chunk at byte {position}"
        position = start + length
        parts.append(part)
        if kind in (FULL, LAST):
            yield b"".join(parts)
            parts = []
    assert not parts, "the last record is not complete"


def read_run_file(path: Path) -> RunFile:
    """All that the tests look at."""
    from wandb.proto import wandb_internal_pb2

    found = RunFile()
    for data in read_records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            found.run = {
                "id": run.run_id,
                "project": run.project,
                "group": run.run_group,
                "name": run.display_name,
                "tags": list(run.tags),
            }
            found.config |= _values(run.config.update)
        elif kind == "config":
            found.config |= _values(record.config.update)
        elif kind == "history":
            row = _values(record.history.item)
            found.rows.append({key: value for key, value in row.items() if not key.startswith("_")})
        elif kind == "summary":
            found.summary |= _values(record.summary.update)
        elif kind == "metric":
            found.metrics[record.metric.glob_name or record.metric.name] = record.metric.step_metric
        elif kind == "exit":
            found.exit_code = record.exit.exit_code
    return found


def _values(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
