"""Delta tables as other engines write them: deletion vectors, renamed columns, features, made by hand in the log."""

from __future__ import annotations

import json
import struct
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
ROARING_ARRAY, ROARING = 1681511377, 12346  # magic numbers of the two formats


def commit_path(root: Path, version: int) -> Path:
    return root / "_delta_log" / f"{version:020}.json"


def actions(root: Path, version: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in commit_path(root, version).read_text().splitlines()]


def commit(root: Path, found: Iterable[dict[str, Any]]) -> int:
    """Add a version of these actions; returns its number."""
    version = 1 + max(int(path.stem) for path in (root / "_delta_log").glob("*.json") if path.stem.isdigit())
    head = {"commitInfo": {"timestamp": 0, "operation": "MANUAL"}}
    commit_path(root, version).write_text("\n".join(map(json.dumps, [head, *found])) + "\n")
    return version


def rewrite(root: Path, version: int, **changed: dict[str, Any]) -> None:
    """Change the fields of the actions of a version that have these names: `protocol={...}`, `metaData={...}`."""
    found = actions(root, version)
    for action in found:
        for name, values in changed.items():
            if name in action:
                action[name] |= values
    commit_path(root, version).write_text("\n".join(map(json.dumps, found)) + "\n")


def last(root: Path, name: str) -> dict[str, Any]:
    """The newest action of this name: `metaData`, `protocol`."""
    for path in sorted((root / "_delta_log").glob("*.json"), reverse=True):
        for action in actions(root, int(path.stem)):
            if name in action:
                return action[name]
    raise KeyError(name)


def change_schema(root: Path, change: Callable[[list[dict[str, Any]]], None], **metadata: Any) -> int:
    """Commit a schema: the fields of the newest after `change(fields)`, and other changes of the metadata."""
    found = last(root, "metaData")
    schema = json.loads(found["schemaString"])
    change(schema["fields"])
    return commit(root, [{"metaData": {**found, "schemaString": json.dumps(schema), **metadata}}])


def add_mapped_column(root: Path, name: str, kind: Any) -> int:
    """As ALTER TABLE ADD COLUMN of a table with column mapping: a column that no file has yet."""
    found = last(root, "metaData")
    number = int(found["configuration"]["delta.columnMapping.maxColumnId"]) + 1
    mapping = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": f"col-{uuid.uuid4()}"}
    field = {"name": name, "type": kind, "nullable": True, "metadata": mapping}
    configuration = {**found["configuration"], "delta.columnMapping.maxColumnId": str(number)}
    return change_schema(root, lambda fields: fields.append(field), configuration=configuration)


def rename_column(root: Path, old: str, new: str) -> int:
    """As ALTER TABLE RENAME COLUMN of a table with column mapping: files and physical names stay."""

    def change(fields: list[dict[str, Any]]) -> None:
        for field in fields:
            field["name"] = new if field["name"] == old else field["name"]

    partitions = [new if name == old else name for name in last(root, "metaData")["partitionColumns"]]
    return change_schema(root, change, partitionColumns=partitions)


def adds(root: Path) -> list[dict[str, Any]]:
    """The `add` actions of the newest version: those of its log that were not removed."""
    live: dict[str, dict[str, Any]] = {}
    for path in sorted((root / "_delta_log").glob("*.json")):
        for action in actions(root, int(path.stem)):
            live.pop(action.get("remove", {}).get("path", ""), None)
            if "add" in action:
                live[action["add"]["path"]] = action["add"]
    return list(live.values())


def delete_rows(root: Path, deleted: dict[str, list[int]], on_disk: bool = False) -> int:
    """Commit deletion vectors: of the files with these paths in the log, the rows at these positions."""
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    protocol = last(root, "protocol")
    if protocol["minReaderVersion"] == 2:  # which stands for this feature
        features = {name: [*known, "columnMapping"] for name, known in features.items()}
    for name in features:
        features[name] = sorted({*features[name], *(protocol.get(name) or [])})
    changes: list[dict[str, Any]] = [{"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}}]
    for add in adds(root):
        if add["path"] in deleted:
            vector = _descriptor(root, deleted[add["path"]], on_disk)
            old = {"deletionVector": add["deletionVector"]} if add.get("deletionVector") else {}
            changes.append({"remove": {"path": add["path"], "deletionTimestamp": 0, "dataChange": True, **old}})
            changes.append({"add": {**add, "deletionVector": vector}})
    return commit(root, changes)


def _descriptor(root: Path, rows: list[int], on_disk: bool) -> dict[str, Any]:
    data = struct.pack("<iqi", ROARING_ARRAY, 1, 0) + _roaring(sorted(rows))
    if not on_disk:
        padded = data + b"\0" * (-len(data) % 4)
        place = {"storageType": "i", "pathOrInlineDv": "".join(_z85(padded))}
    else:
        name = uuid.uuid4()
        file = struct.pack(">bi", 1, len(data)) + data + struct.pack(">I", zlib.crc32(data))
        (root / f"deletion_vector_{name}.bin").write_bytes(file)
        place = {"storageType": "u", "pathOrInlineDv": "".join(_z85(name.bytes)), "offset": 1}
    return {**place, "sizeInBytes": len(data), "cardinality": len(rows)}


def _roaring(rows: list[int]) -> bytes:
    """A bitmap of one container, a sorted array, as the Roaring format specification has it."""
    assert 0 < len(rows) <= 4096 and rows[-1] < 1 << 16
    head = struct.pack("<IIHHI", ROARING, 1, 0, len(rows) - 1, 16)
    return head + struct.pack(f"<{len(rows)}H", *rows)


def _z85(data: bytes) -> Iterator[str]:
    for (word,) in struct.iter_unpack(">I", data):
        yield "".join(Z85[word // 85**power % 85] for power in (4, 3, 2, 1, 0))
