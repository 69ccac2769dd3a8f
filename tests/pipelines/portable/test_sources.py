"""Which files travel with a model, and which packages it needs installed."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest

from sparkring.conf.config import RunConfig
from sparkring.pipelines.model.sources import collect, imported, model_sources, requirements

FILES = {
    "shop/__init__.py": "",
    "shop/model.py": """
from __future__ import annotations
from typing import TYPE_CHECKING
import torch
from . import layers
from .deep.blocks import Block
try:
    import no_such_package
except ImportError:
    no_such_package = None
if TYPE_CHECKING:
    import shop.editor

class Net(torch.nn.Module):
    def forward(self, x):
        from shop_helpers import scale
        import sklearn
        return scale(x)
""",
    "shop/layers.py": "import sys, json\n",
    "shop/deep/blocks.py": "from ..layers import sys\nBlock = None\n",  # a folder without __init__.py
    "shop/editor.py": "import pyspark\n",
    "shop/unused.py": "",
    "shop_helpers.py": "import numpy as np\nfrom sparkring.training.models.tabular import Tabular\n",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_users_modules_travel_with_all_they_import(project: Path) -> None:
    found = collect(["shop.model"])
    own = {name for name in found.files if not name.startswith("sparkring/")}
    assert own == {"shop/__init__.py", "shop/model.py", "shop/layers.py", "shop/deep/blocks.py", "shop_helpers.py"}
    assert found.files["shop/model.py"] == FILES["shop/model.py"]
    assert "sparkring/training/models/tabular.py" in found.files
    assert {"torch", "numpy", "sklearn"} <= found.packages and not {"pyspark", "no_such_package"} & found.packages


def test_a_package_in_a_folder_of_its_own_is_required_and_not_copied(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install --target`, as clusters do whose Python is read-only; a checkout with an egg-info is the user's."""
    folder = tmp_path_factory.mktemp("target")
    wheel = folder / "shop_rates-1.5-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("shop_rates/__init__.py", "")
        archive.writestr("shop_rates-1.5.dist-info/METADATA", "Metadata-Version: 2.1\nName: shop-rates\nVersion: 1.5\n")
        archive.writestr(
            "shop_rates-1.5.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("shop_rates-1.5.dist-info/RECORD", "shop_rates/__init__.py,,\n")
    site = folder / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", f"--target={site}", str(wheel)],
        check=True,
    )
    monkeypatch.syspath_prepend(site)
    (project / "shop_rated.py").write_text("import shop_rates, shop_helpers\n")
    (project / "shop.egg-info").mkdir()
    (project / "shop.egg-info/top_level.txt").write_text("shop_rated\nshop_helpers\n")
    found = collect(["shop_rated"])
    assert "shop_rates" in found.packages and not [name for name in found.files if name.startswith("shop_rates")]
    assert {"shop_rated.py", "shop_helpers.py"} <= found.files.keys()
    assert "shop-rates==1.5" in requirements({"shop_rates"})


def test_a_model_of_ours_needs_neither_spark_nor_plots_nor_the_store() -> None:
    table = model_sources(RunConfig(name="t"))
    assert table.packages == {"numpy", "pandas", "pyarrow", "pydantic", "pydantic_core", "torch", "typing_extensions"}
    text = model_sources(RunConfig.model_validate({"name": "t", "model": {"task": "language_model"}}))
    assert text.packages - table.packages == {"tokenizers"}
    assert not [name for name in table.files if "/launch/" in name or "/etl/" in name or "/parallel/" in name]


def test_a_file_is_parsed_once_however_many_models_are_packed() -> None:
    """A backfill packs a model a date, in one process."""
    first = model_sources(RunConfig(name="t"))
    parsed = imported.cache_info().misses
    assert model_sources(RunConfig(name="t")) == first and imported.cache_info().misses == parsed


def test_requirements_are_pinned_without_a_builds_own_part() -> None:
    pinned = requirements({"torch", "pydantic_core"})
    assert pinned == [
        f"mlflow-skinny=={version('mlflow-skinny')}",
        f"pydantic_core=={version('pydantic_core')}",
        f"torch=={version('torch').partition('+')[0]}",
    ]


def test_requirements_are_those_that_the_standard_library_finds() -> None:
    known = packages_distributions()
    for packages in [{"yaml", "PIL", "google", "torch"}, set(known), set[str](), {"no_such_package"}]:
        names = {name for package in packages for name in known.get(package, [])} | {"mlflow-skinny"}
        assert requirements(packages) == sorted(f"{name}=={version(name).partition('+')[0]}" for name in names)


def test_what_a_model_does_not_carry_is_found_in_an_installed_sparkring(tmp_path: Path) -> None:
    """A notebook may load a model first, and use more of sparkring afterwards."""
    for name, text in model_sources(RunConfig(name="t")).files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert not (tmp_path / "sparkring/conf/load.py").exists()
    program = "import sys; sys.path.insert(0, sys.argv[1]); import sparkring.pipelines.serving as s; print(s.__file__);"
    program += "print('pyspark' in sys.modules);"
    program += "import sparkring.conf.load, sparkring.etl.errors; print('found')"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == [str(tmp_path / "sparkring/pipelines/serving.py"), "False", "found"], done.stderr


def test_a_process_that_has_loaded_a_network_finds_what_a_model_of_trees_brings(tmp_path: Path) -> None:
    """Each carries what its own family needs, and the packages that are imported are the first one's."""
    for family in ("net", "trees"):
        config = RunConfig.model_validate({"name": "t", "dataset": "d", "model": {"family": family}})
        for name, text in model_sources(config).files.items():
            (tmp_path / family / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / family / name).write_text(text)
    assert not (tmp_path / "net/sparkring/training/trees/model.py").exists()
    program = """
import sys
sys.path = [place for place in sys.path if place] + [sys.argv[1] + "/net"]
sys.meta_path = [each for each in sys.meta_path if "editable" not in type(each).__name__ + str(each)]
from sparkring.pipelines.serving import extend_packages
try:
    import sparkring.training.trees.model
except ModuleNotFoundError as error:
    print(error.name)
sys.path.append(sys.argv[1] + "/trees")
extend_packages("sparkring")
import sparkring.training.trees.model
print(sparkring.training.trees.model.__file__)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, env=alone)
    missing, file = done.stdout.split()
    assert missing.startswith("sparkring.training.trees"), done.stderr
    assert file == str(tmp_path / "trees/sparkring/training/trees/model.py")


def test_modules_without_source_are_named(project: Path) -> None:
    """One that is compiled, and one of another Python; a package that raises when it is imported is passed over."""
    py_compile.compile(str(project / "shop_helpers.py"), cfile=str(project / "compiled.pyc"))
    (project / "older.py").write_text("print 'x'\n")
    (project / "angry").mkdir()
    (project / "angry/__init__.py").write_text("raise RuntimeError('not here')\n")
    (project / "mine.py").write_text("import compiled, older\nfrom angry import x\n")
    found = collect(["mine"])
    assert sorted(found.left_out) == ["compiled", "older"] and "mine.py" in found.files
