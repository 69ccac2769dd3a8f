"""One way of reading one dataset, measured in a process of its own: prints a JSON line.

    python benchmarks/data_cases.py CASE FOLDER BATCH SECONDS [cold]

Runs in this project's environment or, for the peers, in theirs (benchmarks/peers.txt): a case imports what it needs.
Every case delivers torch tensors of all columns in batches of BATCH rows and touches every element once (a maximum: a
sum would first copy the pixels of an image into eight bytes each). A case that is too slow for the whole dataset stops
after SECONDS of CPU; rows per CPU-second count what was delivered. `cold`: the files are dropped from the page cache
before the clocks start.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WINDOW = 8  # row groups shuffled together by `limit` and, as its buffer, by petastorm
Gather = Callable[[Any, Any], Any]  # (values (n, ...), order (n,)), of numpy: the tensor of values in that order
Batches = Iterator[tuple[int, list[Any]]]
"""Rows and tensors of each batch; -1 rows: ready, set-up ends here, with the reader's own meter if it has one."""


def manifest_files(folder: str) -> list[str]:
    manifest = json.loads(Path(folder, "_manifest.json").read_text())
    return [str(Path(folder, file["path"])) for file in manifest["files"]]


def group_rows(folder: str) -> int:
    manifest = json.loads(Path(folder, "_manifest.json").read_text())
    return int(manifest["files"][0]["row_groups"][0])


def decode_only(folder: str, batch: int) -> Batches:
    """The floor: pyarrow decodes every row group, and nothing is done with it."""
    import pyarrow.parquet as pq

    for path in manifest_files(folder):
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, use_threads=False).num_rows, []


def torch_gather(values: Any, order: Any) -> Any:
    import torch

    return torch.index_select(torch.from_numpy(values), 0, torch.from_numpy(order))


def numpy_gather(values: Any, order: Any) -> Any:
    import torch

    return torch.from_numpy(values.take(order, axis=0, mode="clip"))


def decode_and_gather(folder: str, batch: int, gather: Gather) -> Batches:
    """The limit: decode WINDOW row groups, permute the window once, hand out views. Fixed columns only."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)
    places = [(path, g) for path in manifest_files(folder) for g in range(pq.ParquetFile(path).num_row_groups)]
    files = {path: pq.ParquetFile(path) for path in {p for p, _ in places}}
    for at in range(0, len(places), WINDOW):
        parts = [files[path].read_row_group(g, use_threads=False) for path, g in places[at : at + WINDOW]]
        table = pa.concat_tables(parts)
        order = random.permutation(table.num_rows)
        columns = []
        for name in table.column_names:
            chunks = [chunk.to_numpy() for chunk in table.column(name).chunks]
            columns.append(gather(np.concatenate(chunks), order))
        for begin in range(0, table.num_rows, batch):
            yield len(order[begin : begin + batch]), [c[begin : begin + batch] for c in columns]


def decode_transform_gather(folder: str, batch: int, gather: Gather) -> Batches:
    """The limit of features: as `decode_and_gather`, with the same transforms by hand, in numpy, before the gather."""
    import numpy as np
    import pyarrow.parquet as pq

    states = json.loads(Path(folder, "_manifest.json").read_text())["features"]
    by_name = {state["name"]: state for state in states["features"]}
    texts = [name for name, spark_type in states["inputs"].items() if spark_type == "string"]
    code_of = {n: {v: 2 + i for i, v in enumerate(by_name[n]["values"])} for n in texts}
    table_of = {n: np.arange(2, 2 + len(s["values"]), dtype=np.int32) for n, s in by_name.items() if n[0] == "c"}
    files = {path: pq.ParquetFile(path, read_dictionary=texts) for path in manifest_files(folder)}
    places = [(file, g) for file in files.values() for g in range(file.num_row_groups)]
    random = np.random.default_rng(0)

    def made(name: str, array: Any) -> Any:
        if name in texts:
            codes = [code_of[name].get(text, 1) for text in array.dictionary.to_pylist()]
            indices = array.indices.fill_null(len(codes)).to_numpy()
            return np.take(np.array([*codes, 0], np.int32), indices)
        values = array.to_numpy(zero_copy_only=False)  # a null double becomes NaN
        if name in table_of:
            size = len(table_of[name])
            return np.where(values < size, np.take(table_of[name], values, mode="clip"), np.int32(1))
        if name not in by_name:
            return values
        state = by_name[name]
        filled = np.where(np.isnan(values), state["fill"], values)
        return ((filled - state["mean"]) / state["std"]).astype(np.float32)

    for at in range(0, len(places), WINDOW):
        parts = [file.read_row_group(g, use_threads=False) for file, g in places[at : at + WINDOW]]
        order = random.permutation(sum(part.num_rows for part in parts))
        columns = []
        for name in parts[0].column_names:
            chunks = [made(name, chunk) for part in parts for chunk in part.column(name).chunks]
            columns.append(gather(np.concatenate(chunks), order))
        for begin in range(0, len(order), batch):
            yield len(order[begin : begin + batch]), [c[begin : begin + batch] for c in columns]


def sparkring(folder: str, batch: int, **how: Any) -> Batches:
    sys.path.insert(0, str(ROOT))
    from sparkring.conf.blocks.data import DataConfig
    from sparkring.conf.manifest import DatasetManifest
    from sparkring.conf.storage import open_storage
    from sparkring.training.data.batch import Ragged
    from sparkring.training.data.reader import ParquetReader
    from sparkring.training.data.request import ReadRequest

    manifest = DatasetManifest.from_json(Path(folder, "_manifest.json").read_text(), folder)
    images = [c.name for c in manifest.columns if c.layout == "binary"]
    config = DataConfig(**{"verify": "hash", "tail": "drop", "decoders": dict.fromkeys(images, "image")} | how)
    request = ReadRequest(open_storage(folder), manifest, "train", None, batch)
    reader = ParquetReader(request, config=config)
    reader.verify()  # hashing is timed apart: it happens once per job, not once per epoch
    reader.meter.take()
    yield -1, [reader.meter]
    for part in reader.batches(0):
        tensors = []
        for value in part.columns.values():
            tensors += [value.values, *value.offsets] if isinstance(value, Ragged) else [value]
        yield part.rows, tensors
    reader.close()


def petastorm_batched(folder: str, batch: int, shuffled: bool) -> Batches:
    sys.path.insert(0, str(ROOT))
    import sparkring.training.data.petastorm_adapter  # noqa: F401, I001  (petastorm 0.12.1 does not import without)
    from petastorm import make_batch_reader
    from petastorm.pytorch import BatchedDataLoader

    urls = [f"file://{path}" for path in manifest_files(folder)]
    capacity = WINDOW * group_rows(folder) if shuffled else 0
    with make_batch_reader(urls, num_epochs=1, workers_count=2, shuffle_row_groups=shuffled) as reader:
        for part in BatchedDataLoader(reader, batch_size=batch, shuffling_queue_capacity=capacity):
            yield len(next(iter(part.values()))), list(part.values())


def petastorm_with_transforms(folder: str, batch: int) -> Batches:
    """petastorm makes the same tensors, by this project's transforms in its workers."""
    sys.path.insert(0, str(ROOT))
    import sparkring.training.data.petastorm_adapter  # noqa: F401, I001  (petastorm does not import without)
    from petastorm import make_batch_reader
    from petastorm.pytorch import BatchedDataLoader

    from sparkring.conf.manifest import DatasetManifest
    from sparkring.training.data.petastorm_adapter.reader import transform_spec
    from sparkring.training.data.features.tensors import TensorSource

    manifest = DatasetManifest.from_json(Path(folder, "_manifest.json").read_text(), folder)
    tensors = TensorSource(manifest, None)
    urls, capacity = [f"file://{path}" for path in manifest_files(folder)], WINDOW * group_rows(folder)
    names = [column.name for column in tensors.stored]
    with make_batch_reader(
        urls, schema_fields=names, num_epochs=1, workers_count=2, shuffle_row_groups=True,
        transform_spec=transform_spec(tensors),
    ) as reader:  # fmt: skip
        for part in BatchedDataLoader(reader, batch_size=batch, shuffling_queue_capacity=capacity):
            yield len(next(iter(part.values()))), list(part.values())


def petastorm_rows(folder: str, batch: int) -> Batches:
    sys.path.insert(0, str(ROOT))
    import sparkring.training.data.petastorm_adapter  # noqa: F401, I001
    from petastorm import make_batch_reader
    from petastorm.pytorch import DataLoader

    urls = [f"file://{path}" for path in manifest_files(folder)]
    capacity = WINDOW * group_rows(folder)
    with make_batch_reader(urls, num_epochs=1, workers_count=2, shuffle_row_groups=True) as reader:
        for part in DataLoader(reader, batch_size=batch, shuffling_queue_capacity=capacity):
            yield len(next(iter(part.values()))), list(part.values())


def hugging_face(folder: str, batch: int, shuffled: bool) -> Batches:
    """`datasets` streaming Parquet, torch format; shuffled through a buffer of 10,000 rows, 1,000 of images."""
    from datasets import Image, load_dataset

    data = load_dataset("parquet", data_files=manifest_files(folder), streaming=True, split="train")
    images = "image" in (data.column_names or [])
    if images:
        data = data.cast_column("image", Image())
    if shuffled:
        data = data.shuffle(seed=0, buffer_size=1000 if images else 10_000)
    for part in data.with_format("torch").iter(batch_size=batch):
        yield len(next(iter(part.values()))), _flat(part)


def _flat(part: dict[str, Any]) -> list[Any]:
    out: list[Any] = []
    for value in part.values():
        out += value if isinstance(value, list) else [value]
    return out


def _collate(rows: list[dict[str, Any]]) -> list[Any]:
    import numpy as np
    import torch

    out: list[Any] = []
    for name in rows[0]:
        values = [row[name] for row in rows]
        if isinstance(values[0], np.ndarray) and len({v.shape for v in values}) > 1:
            out.append(torch.from_numpy(np.concatenate(values)))
        else:
            out.append(torch.from_numpy(np.stack([_decoded(v, np) for v in values])))
    return out


def lit_data(folder: str, batch: int, shuffled: bool) -> Batches:
    """LitData's own optimized format, its StreamingDataset and DataLoader."""
    from litdata import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(f"{folder}/litdata", shuffle=shuffled, drop_last=False)
    for part in StreamingDataLoader(data, batch_size=batch, num_workers=0, collate_fn=_collate):
        yield len(part[0]), part


def mosaic(folder: str, batch: int, shuffled: bool) -> Batches:
    """MosaicML's MDS, its StreamingDataset under torch's DataLoader."""
    streaming = _import_streaming()
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    clean_stale_shared_memory()
    data = streaming.StreamingDataset(local=f"{folder}/mds", shuffle=shuffled, batch_size=batch)
    for part in DataLoader(data, batch_size=batch, num_workers=0, collate_fn=_collate):
        yield len(part[0]), part


def _import_streaming() -> Any:
    """streaming imports torchvision for helpers no case uses; a stand-in, for that import only, where it is missing."""
    import importlib.util
    import types

    names = ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional")
    missing = importlib.util.find_spec("torchvision") is None
    import transformers  # noqa: F401  (looks for torchvision itself: before the stand-in)

    if missing:
        for name in names:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__spec__ = importlib.util.spec_from_loader(name, None)
        sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
        sys.modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]
    import streaming

    for name in names if missing else ():
        del sys.modules[name]
    return streaming


def prepare_peers(folder: str, limit: int) -> None:
    """Write the same first `limit` rows in the peers' own formats."""
    import numpy as np
    import pyarrow.parquet as pq
    from litdata.streaming.writer import BinaryWriter

    streaming = _import_streaming()

    def rows() -> Iterator[dict[str, Any]]:
        left = limit
        for path in manifest_files(folder):
            file = pq.ParquetFile(path)
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                columns = {name: table.column(name).to_pylist() for name in table.column_names}
                kinds = {f.name: f.type for f in table.schema}
                for number in range(table.num_rows):
                    if left == 0:
                        return
                    left -= 1
                    yield {n: _native(v[number], kinds[n], np) for n, v in columns.items()}

    first = next(rows())
    kinds = {name: _mds_kind(value, np) for name, value in first.items()}
    with streaming.MDSWriter(out=f"{folder}/mds", columns=kinds, compression=None) as out:
        for row in rows():
            out.write(row)
    os.makedirs(f"{folder}/litdata", exist_ok=True)
    writer = BinaryWriter(f"{folder}/litdata", chunk_bytes="64MB")
    for number, row in enumerate(rows()):
        writer.add_item(number, {n: _lit_value(v) for n, v in row.items()})
    writer.done()
    writer.merge()


def _native(value: Any, kind: Any, np: Any) -> Any:
    if isinstance(value, list):
        return np.array(value, kind.value_type.to_pandas_dtype())
    return value if isinstance(value, bytes) else kind.to_pandas_dtype()(value)


def _mds_kind(value: Any, np: Any) -> str:
    if isinstance(value, bytes):
        return "jpeg" if value[:2] == b"\xff\xd8" else "bytes"
    return f"ndarray:{value.dtype}" if isinstance(value, np.ndarray) else str(np.dtype(type(value)))


def _lit_value(value: Any) -> Any:
    """Numpy scalars as Python's; images stay bytes, which `_collate` decodes as every other case does, with Pillow."""
    return value.item() if hasattr(value, "item") and not value.shape else value


def _decoded(value: Any, np: Any) -> Any:
    if not isinstance(value, bytes):
        return np.asarray(value)
    import io

    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(value)))


CASES: dict[str, Callable[[str, int], Batches]] = {
    "decode alone": decode_only,
    "decode + torch gather": lambda f, b: decode_and_gather(f, b, torch_gather),
    "decode + numpy gather": lambda f, b: decode_and_gather(f, b, numpy_gather),
    "decode + transforms + torch gather": lambda f, b: decode_transform_gather(f, b, torch_gather),
    "decode + transforms + numpy gather": lambda f, b: decode_transform_gather(f, b, numpy_gather),
    "sparkring": sparkring,
    "sparkring 8 lanes": lambda f, b: sparkring(f, b, lanes=8, window_row_groups=1),
    "sparkring 2 threads": lambda f, b: sparkring(f, b, threads=2),
    "sparkring unshuffled": lambda f, b: sparkring(f, b, shuffle=False, lanes=1, window_row_groups=1),
    "petastorm BatchedDataLoader": lambda f, b: petastorm_batched(f, b, True),
    "petastorm BatchedDataLoader unshuffled": lambda f, b: petastorm_batched(f, b, False),
    "petastorm DataLoader": petastorm_rows,
    "petastorm with transforms": petastorm_with_transforms,
    "HF datasets": lambda f, b: hugging_face(f, b, True),
    "HF datasets unshuffled": lambda f, b: hugging_face(f, b, False),
    "LitData": lambda f, b: lit_data(f, b, True),
    "MosaicML streaming": lambda f, b: mosaic(f, b, True),
}
PEERS = ("HF datasets", "HF datasets unshuffled", "LitData", "MosaicML streaming")


def cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def touch(tensors: list[Any]) -> None:
    for tensor in tensors:
        if tensor.numel():
            tensor.max()


def import_for(case: str) -> None:
    """Import what the case will, so that neither time counts it."""
    sys.path.insert(0, str(ROOT))
    if case.startswith("sparkring"):
        import sparkring.training.data.reader
    elif case.endswith("gather"):
        import pandas  # noqa: F401  (to_numpy would)
    elif case.startswith("petastorm"):
        import sparkring.training.data.petastorm_adapter  # noqa: F401, I001
        import petastorm.pytorch  # noqa: F401
    elif case.startswith("HF"):
        import datasets  # noqa: F401
    elif case == "LitData":
        import litdata  # noqa: F401
    elif case == "MosaicML streaming":
        _import_streaming()


def cool(folder: str) -> None:
    """Ask the kernel to drop every file from the page cache (clean pages only: they were synced)."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(case: str, folder: str, batch: int, limit_s: float, cold: bool) -> dict[str, Any]:
    import numpy  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import torch

    torch.set_num_threads(1)
    import_for(case)
    if cold:
        cool(folder)
    began, cpu = time.perf_counter(), cpu_s()
    rows, first, meter = 0, 0.0, None
    for count, tensors in CASES[case](folder, batch):
        if count < 0:
            meter = tensors[0] if tensors else None
            if cold:  # what hashed the files has read them
                cool(folder)
            began, cpu = time.perf_counter(), cpu_s()
            continue
        touch(tensors)
        rows += count
        first = first or time.perf_counter() - began
        if cpu_s() - cpu > limit_s:
            break
    wall, spent = time.perf_counter() - began, cpu_s() - cpu
    account = {} if meter is None else meter.take()
    return {"case": case, "rows": rows, "wall_s": wall, "cpu_s": spent, "first_batch_s": first, "account": account}


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare_peers(sys.argv[2], int(sys.argv[3]))
    else:
        case, folder, batch, limit_s = sys.argv[1:5]
        print(json.dumps(measure(case, folder, int(batch), float(limit_s), sys.argv[5:] == ["cold"])), flush=True)
        os._exit(0)  # a case that was stopped early has workers that would be waited for
