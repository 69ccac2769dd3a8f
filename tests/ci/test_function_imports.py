"""An import inside a function is there for start-up time or an optional library; all else is imported at the top."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.ci.test_docs import ROOT
from tests.ci.test_strings import CORE

# Libraries that take a tenth of a second or more to import, or that an installation may lack.
SLOW = {"PIL", "boto3", "botocore", "cloudpickle", "cryptography", "fsspec", "matplotlib", "mlflow", "numpy", "onnx_ir"}
SLOW |= {"onnxruntime", "onnxscript", "pandas", "psutil", "py4j", "pyarrow", "pydantic", "pyspark", "scipy", "sklearn"}
SLOW |= {"sqlglot", "tokenizers", "torch", "xgboost"}
OPTIONAL = {"deltalake", "horovod", "openlineage", "optuna", "petastorm", "pyiceberg", "ray", "snappy", "strictyaml"}
OPTIONAL |= {"zstandard"}


@cache
def modules() -> dict[str, Path]:
    """The file of each of our modules by its name."""
    found = {}
    for path in (path for package in CORE for path in sorted((ROOT / package).rglob("*.py"))):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join(parts if parts[0] == "sparkring" else ("sparkring", *parts))] = path
    return found


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or "", *(n for alias in node.names if (n := f"{node.module}.{alias.name}") in modules())]


def statements(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run when a module is imported."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try | ast.With):
            yield from statements(node.body)


@cache
def imported_at_start(module: str) -> list[str]:
    """The modules that are imported when this one is."""
    return [each for node in statements(ast.parse(modules()[module].read_text()).body) for each in imported(node)]


@cache
def libraries(module: str) -> frozenset[str]:
    """The libraries of others that are imported with a module, by itself and by what it imports."""
    found, left, seen = set[str](), [module], set[str]()
    while left:
        if (name := left.pop()) in seen:
            continue
        seen.add(name)
        left += [name.rpartition(".")[0]] if "." in name and name.startswith("sparkring") else []
        if name not in modules():
            found.add(name.partition(".")[0])
            continue
        left += imported_at_start(name)
    return frozenset(found)


def needless(module: str) -> list[str]:
    """Imports inside functions of a module that bring no slow or optional library, and no comment says why."""
    text = modules()[module].read_text()
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {n.lineno: n for f in functions for n in ast.walk(f) if isinstance(n, ast.Import | ast.ImportFrom)}
    there, lines = libraries(module), text.splitlines()
    return [
        f"{modules()[module]}:{line}: {lines[line - 1].strip()}"
        for line, node in sorted(inside.items())
        if not (frozenset().union(*map(libraries, imported(node))) - there) & (SLOW | OPTIONAL)
        and "#" not in "".join(lines[line - 1 : node.end_lineno]).split("# noqa")[0].split("# type:")[0]
    ]


def test_an_import_inside_a_function_brings_a_slow_or_optional_library() -> None:
    found = {module: needless(module) for module in modules() if ".cli" not in module}  # a command imports what it runs
    assert [line for lines in found.values() for line in lines] == []


def test_the_check_finds_what_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = "    import json\n    import torch\n    import sys  # a reason\n    from sparkring.conf import digest\n"
    (tmp_path / "m.py").write_text(f"import os\n\ndef f():\n{reasons}")
    monkeypatch.setitem(modules(), "m", tmp_path / "m.py")
    found = [line.rpartition(": ")[2] for line in needless("m")]
    assert found == ["import json", "from sparkring.conf import digest"]
