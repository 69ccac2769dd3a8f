"""`sparkring export`: a registered model as one file of torch.export or ONNX, for what serves without Python.

Trees become XGBoost's own file, which every library that reads its models takes. Of a network the file
computes what the model does after its features: from the tensors that they make of a raw row to the
prediction. What they do is data, not computation (vocabularies, scales), and stands in the file's metadata under
METADATA.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from sparkring.conf.blocks.predict import REGISTERED
from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.errors import first_line
from sparkring.conf.load import ConfigError
from sparkring.conf.manifest import Column
from sparkring.conf.plain_text import count_of
from sparkring.conf.storage import open_storage
from sparkring.pipelines.model.check import data_folder, find_folder
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.run.scratch import scratch_folder
from sparkring.pipelines.serving import CODE, Predictor, Writer, load_trusted
from sparkring.training.checkpoint.weights import FILE as WEIGHTS
from sparkring.training.data.decoding.columns import numpy_dtype
from sparkring.training.model.folder import CONFIG, TREES_FILE, TrainedModel, read_model_folder
from sparkring.training.models.sparse_embedding import sparse_embeddings

Format = Literal["pt2", "onnx", "ubj", "json"]
FORMATS: dict[str, tuple[Format, ...]] = {"net": ("pt2", "onnx"), "trees": ("ubj", "json")}
"""What a family of models can be written as, the default first."""
Tensors = dict[str, torch.Tensor]
METADATA = "sparkring.json"
TOLD = ("name", "column", "kind", "values", "period")  # of features of trees, which no scale changes
TRACED_ROWS, CHECKED_ROWS = 3, (1, 2, 257)  # the file must not know how many it was made with
ROUNDING = 1e-5  # ONNX's runtime sums in another order


class Exported(nn.Module):
    """tensors by column, each (rows, ...) -> predictions (rows,), or (rows, classes); of a language model logits."""

    def __init__(self, model: nn.Module, inputs: Callable[..., Any], outputs: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self._inputs, self._outputs = model, inputs, outputs

    def forward(self, columns: Tensors) -> torch.Tensor:
        return self._outputs(self.model(*self._inputs(columns)))


@dataclass(frozen=True)
class Source:
    """What is exported: the module, its inputs, and what the file says of itself."""

    module: Exported
    columns: list[Column]
    about: dict[str, Any]
    longest: int = 0  # of a language model: tokens in a row at most

    def example(self, rows: int, seed: int = 0) -> Tensors:
        """Draw random tensors for the columns and masks: codes in range, pixels, numbers near 0."""
        draw = np.random.default_rng(seed)
        made: Tensors = {}
        for column in self.columns:
            shape = (min(self.longest, rows + 2),) if self.longest else column.shape
            size, dtype = (rows, *shape), numpy_dtype(column)
            is_code = dtype.kind in "biu"
            codes = column.cardinality or (256 if dtype == np.uint8 else 2)
            values = draw.integers(0, codes, size) if is_code else draw.standard_normal(size)
            made[column.name] = torch.from_numpy(values.astype(dtype))
            if column.mask is not None:
                made[column.mask] = torch.from_numpy(draw.integers(0, 2, rows).astype(bool))
        return made

    def describe(self) -> dict[str, Any]:
        """Return the file's self-description; shapes leave out the first dimension, the rows."""
        inputs = []
        for column in self.columns:
            shape = ["tokens"] if self.longest else [*column.shape]
            inputs.append({"name": column.name, "dtype": str(numpy_dtype(column)), "shape": shape})
            if column.mask is not None:
                inputs.append({"name": column.mask, "dtype": "bool", "shape": []})
        return self.about | {"inputs": inputs}


BLENDED = (
    "is a blend of a network and trees, which one file cannot hold: export the models of its run, <run>/net/model and "
    "<run>/trees/model, mix what they predict by the share in <run>/model/blend.json, and calibrate that by "
    "<run>/model/calibration.json, where it has one; or serve it from its folder, or by `sparkring predict`"
)


def export(
    target: str, form: Format | None, out: Path | None, tracking: TrackingConfig, say: Callable[[str], None]
) -> int:
    """Write the model as one file, load it again, and compare; returns the exit code.

    Raises StoredError for a target that is no model; ConfigError where `out` exists, a package is missing, or the
    model's code cannot be exported.

    Args:
        target: models:/<name>@<alias>, models:/<name>/<version>, an MLflow model's folder or a run's `model` folder.
        form: format of the file; None for the family's default.
        out: path of the file, written atomically; None for model.<form>.
        tracking: configuration of the registry.
        say: called with lines for the user.
    """
    check_can_write(form, out)
    with scratch_folder("export") as scratch:
        folder = find_files(target, tracking, scratch)
        family = read_model_folder(open_storage(str(folder))).config.model.family
        if family == "both":
            raise ConfigError(target, [BLENDED])
        form = checked_form(target, family, form)
        out = out or Path(f"model.{form}")
        check_can_write(form, out)
        made = scratch / out.name
        problem, how = (export_trees if family == "trees" else export_net)(folder, target, form, made)
        if problem:
            say(f"{target}: {problem}")
            return Exit.QUALITY
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_name(f".{out.name}.part")
        part.write_bytes(made.read_bytes())
        os.replace(part, out)
    say(f"{target}: {out}: {how}")
    return Exit.OK


def checked_form(target: str, family: str, form: Format | None) -> Format:
    """Return the requested form, or the family's default. ConfigError for another family's form."""
    known = FORMATS[family]
    if form is not None and form not in known:
        raise ConfigError(target, [f"--format {form}: a model of family {family} is written as {' or '.join(known)}"])
    return form or known[0]


def export_net(folder: Path, target: str, form: Format, made: Path) -> tuple[str, str]:
    """Write a network, compare the file's outputs; return a problem, or "", and what the file is."""
    source = read_source(folder, target)
    write(source, form, made)
    problem, how = compare(source, form, made)
    return problem, f"{count_of(len(source.columns), 'input')}, any number of rows; {how}"


def export_trees(folder: Path, target: str, form: Format, made: Path) -> tuple[str, str]:
    """Write trees as XGBoost does and read them again; a problem, or "", and what the file is.

    The file's attribute `sparkring` says what its columns are made of: a category is its place in a list. And how the
    model's probabilities are calibrated, which XGBoost does not do.
    """
    import xgboost  # which networks need not have

    from sparkring.training.trees.model import read_trees

    stored = open_storage(str(folder))
    trained, found = read_model_folder(stored), load_trusted(str(folder))
    assert isinstance(found, Predictor), "no language model is of trees"
    about = about_table(target, stored.sha256(TREES_FILE), trained, found)
    about["features"] = [{key: state[key] for key in TOLD if key in state} for state in found.raw.states]
    trees = read_trees(stored, trained.config, trained.manifest).booster
    as_stored = trees.save_raw("ubj")
    trees.set_attr(sparkring=json.dumps(about))
    trees.save_model(made)
    again = xgboost.Booster(model_file=made)
    again.set_attr(sparkring=None)
    problem = "" if again.save_raw("ubj") == as_stored else "the file that was written holds other trees"
    how = f"{trees.num_boosted_rounds()} rounds over {trees.num_features()} columns, as XGBoost's own file"
    apart = "" if found.calibration is None else ", without the calibration, which its attribute `sparkring` describes"
    return problem, how + apart


def about_table(target: str, sha256: str, trained: TrainedModel, found: Predictor) -> dict[str, Any]:
    """Describe a table's model in its file. `sha256`: hash of its weights, or trees."""
    about: dict[str, Any] = {"model": target, "weights_sha256": sha256, "task": trained.config.model.task}
    about |= {"classes": found.label_names or list(trained.manifest.classes), "features": found.raw.states}
    return about | ({} if found.calibration is None else {"calibration": asdict(found.calibration)})


def check_can_write(form: Format | None, out: Path | None) -> None:
    """Raise ConfigError for a file that exists, or where the packages of its format are missing."""
    exists = out is not None and out.exists()
    problems = [f"--out {out}: exists; take another name, or delete it"] if exists else []
    if form == "onnx":
        try:
            import onnxruntime  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as error:
            problems.append(f"--format onnx needs {error.name}: pip install 'sparkring[onnx]'")
    if problems:
        raise ConfigError("export", problems)


def find_files(target: str, tracking: TrackingConfig, scratch: Path) -> Path:
    """Return the folder of a model's own files, copied below `scratch` if registered. StoredError for none."""
    if not REGISTERED.fullmatch(target) and (Path(target) / CONFIG).exists():
        return Path(target)
    return data_folder(find_folder(target, tracking, scratch), target)


def read_source(folder: Path, target: str) -> Source:
    """Load a network. StoredError for what is none, or is not trusted."""
    code = folder.parent.parent / CODE
    if code.is_dir():
        sys.path.append(str(code))  # as MLflow does; last, so that sparkring is the one that runs
    found, stored = load_trusted(str(folder)), open_storage(str(folder))
    assert isinstance(found, Predictor | Writer), "a blend is refused before"
    model: Any = found.model
    if tables := sparse_embeddings(model):
        problem = f"its sparse tables ({', '.join(tables)}) are files beside the model, which one file cannot hold; "
        raise ConfigError(target, [f"{problem}serve it from its folder, or by `sparkring predict`"])
    trained = read_model_folder(stored)
    sha256 = stored.sha256(WEIGHTS)
    if isinstance(found, Writer):
        module = Exported(model, lambda columns: (columns["tokens"],), lambda logits: logits)
        tokens = Column(name="tokens", dtype="int64", cardinality=found.codec.size)
        about = {"model": target, "weights_sha256": sha256, "task": trained.config.model.task}
        return Source(module, [tokens], about | {"text": trained.manifest.text}, longest=found.context)
    module = Exported(model, found.task.inputs, found.probabilities)
    return Source(module, found.raw.tensors, about_table(target, sha256, trained, found))


def write(source: Source, form: Format, path: Path) -> None:
    """Trace the module and write it. ConfigError where its code cannot be traced for any number of rows."""
    traced, more = source.example(TRACED_ROWS), {1: Dim.DYNAMIC} if source.longest else {}
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            dynamic = ({name: {0: Dim.DYNAMIC} | more for name in traced},)
            program = torch.export.export(source.module.eval(), (traced,), dynamic_shapes=dynamic)
            text = json.dumps(source.describe())
            if form == "pt2":
                torch.export.save(program, path, extra_files={METADATA: text})
            else:
                _write_onnx(program, list(traced), text, path)
    except Exception as error:  # torch raises many kinds, of the user's code and its own
        raise ConfigError(
            str(source.about["model"]),
            [
                f"its model cannot be exported to {form}: {type(error).__name__}: {first_line(error)}. Its "
                "forward must not branch on values or on the number of rows "
                "(https://docs.pytorch.org/docs/stable/export.html)"
            ],
        ) from error


def _write_onnx(program: ExportedProgram, names: list[str], about: str, path: Path) -> None:
    from onnx_ir.passes.common import NameFixPass  # of the extra [onnx]

    made = torch.onnx.export(program, (), dynamo=True, input_names=names, output_names=["prediction"], verbose=False)
    assert made is not None, "only the older exporter returns nothing"
    NameFixPass()(made.model)  # torch calls values by their operations, such as `cat`, which an input may be called too
    made.model.metadata_props[METADATA] = about
    made.save(path)


def compare(source: Source, form: Format, path: Path) -> tuple[str, str]:
    """Compare the file with the module, on other numbers of rows than it was made with.

    Returns a problem, or "", and how close they are.
    """
    run, exact = _load(form, path), True
    for rows in CHECKED_ROWS:
        given = source.example(rows, seed=rows)
        with torch.no_grad():
            expected = source.module(given).numpy()
        found = run(given)
        if found.shape != expected.shape or not np.allclose(found, expected, rtol=ROUNDING, atol=ROUNDING):
            return (
                f"the {form} file computes something else than the model on {count_of(rows, 'row')}; nothing is "
                "written",
                "",
            )
        exact = exact and found.tobytes() == expected.tobytes()
    checked = f"on {count_of(sum(CHECKED_ROWS), 'random row')} its predictions are the model's "
    return "", checked + ("bit by bit" if exact else f"but for rounding (at most {ROUNDING:g})")


def _load(form: Format, path: Path) -> Callable[[Mapping[str, torch.Tensor]], np.ndarray]:
    if form == "pt2":
        with warnings.catch_warnings(action="ignore"):
            module = torch.export.load(path).module()
        return lambda given: np.asarray(module(dict(given)).detach())
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    wanted = {each.name for each in session.get_inputs()}  # an input that nothing reads is left out

    def run(given: Mapping[str, torch.Tensor]) -> np.ndarray:
        return np.asarray(session.run(None, {name: each.numpy() for name, each in given.items() if name in wanted})[0])

    return run
