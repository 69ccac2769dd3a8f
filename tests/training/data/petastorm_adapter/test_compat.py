"""The import hook that lets petastorm run on today's libraries."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import sparkring.training.data.petastorm_adapter  # noqa: F401  (before petastorm)

ROOT = Path(__file__).resolve().parents[4]
pytestmark = pytest.mark.filterwarnings("ignore")


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True, timeout=600
    )


def test_petastorm_imports_with_the_hook_and_not_without() -> None:
    assert run("import petastorm").returncode != 0
    done = run(
        "import sparkring.training.data.petastorm_adapter, petastorm, petastorm.pytorch, petastorm.etl.dataset_metadata"
    )
    assert done.returncode == 0, done.stderr


def test_pyarrow_and_numpy_stay_as_they_are() -> None:
    done = run("""
        import numpy as np, pyarrow.parquet as pq
        before = pq.ParquetDataset
        import sparkring.training.data.petastorm_adapter, petastorm
        assert pq.ParquetDataset is before and not hasattr(np, "unicode_") and not hasattr(np, "string_")
    """)
    assert done.returncode == 0, done.stderr


def test_an_import_after_petastorm_is_refused() -> None:
    done = run("""
        import sys, types
        sys.modules["petastorm"] = types.ModuleType("petastorm")
        import sparkring.training.data.petastorm_adapter
    """)
    assert "petastorm was imported before" in done.stderr


def test_nothing_else_of_the_data_path_loads_petastorm() -> None:
    done = run(
        "import sys, sparkring.training.data.build, sparkring.training.data.mix, sparkring.training.data.audit\n"
        "assert 'petastorm' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


def test_names_that_numpy_dropped_are_replaced_wherever_petastorm_uses_them() -> None:
    done = run("""
        import sparkring.training.data.petastorm_adapter.compat, pkgutil, inspect, petastorm
        for module in pkgutil.walk_packages(petastorm.__path__, "petastorm."):
            source = module.module_finder.find_spec(module.name).loader.get_source(module.name)
            renamed = sparkring.training.data.petastorm_adapter.compat.renamed(source)
            for name in ("np.unicode_", "np.string_", "np.in1d", "dtype=np.float)"):
                assert name not in renamed, (module.name, name)
        from petastorm.weighted_sampling_reader import WeightedSamplingReader
        from petastorm.predicates import in_intersection
        assert in_intersection([3], "a").do_include({"a": [1, 3]})
    """)
    assert done.returncode == 0, done.stderr


def test_a_schema_pickled_with_a_name_that_numpy_dropped_is_read() -> None:
    from petastorm.etl.legacy import restricted_loads

    assert [restricted_loads(f"cnumpy\n{name}\n.".encode()) for name in ("unicode_", "string_")] == [np.str_, np.bytes_]
