"""The finished model as a folder that predicts from raw rows.

The folder is that of training/model/folder.py; MLflow calls `_load_pyfunc`. Nothing in it is code or an unrestricted
pickle. It names code: the classes of `model.factory` and `model.task`, which must be of `sparkring.training.models`, of
modules that the loading process trusts by SPARKRING_MODEL_MODULES (names with commas between), or, where MLflow loads a
model with its code, of the modules that travel with it (pipelines/portable/).
"""

from __future__ import annotations

import functools
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from sparkring.conf.config import RunConfig
from sparkring.conf.features import State, output_names
from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.conf.plain_text import count_of
from sparkring.conf.references import module_of
from sparkring.conf.storage import Storage, open_storage
from sparkring.conf.stored import StoredError
from sparkring.conf.tasks import LabelForm, task_kind
from sparkring.training.checkpoint.weights import read_weights
from sparkring.training.data.decoding.columns import RaggedArray, numpy_dtype, one_array
from sparkring.training.data.features.tensors import TensorSource
from sparkring.training.data.features.transform import RawColumn, RawFeatures
from sparkring.training.model.blend import Blend
from sparkring.training.model.calibration import Calibration
from sparkring.training.model.contributions import (
    Contributions,
    NetExplainer,
    base_row,
    contribution_problem,
    joined,
    tensors_by_feature,
)
from sparkring.training.model.folder import CONFIG, TrainedModel, attach_tables, read_description, read_model_folder
from sparkring.training.model.recipe_model import build_model, pick_columns, recipe_task, start_model
from sparkring.training.models.gpt import Sampling, generate
from sparkring.training.models.initial import InitialModel
from sparkring.training.trees.columns import seen_by

if TYPE_CHECKING:
    from sparkring.pipelines.tracking.ops import NamedType

Model: TypeAlias = Callable[..., torch.Tensor]
"""A torch module, or trees: from what a task takes of a batch to its outputs."""
BATCH_ROWS = 4096
TENSOR_ROWS = 32_768  # rows whose features are made at once: in fewer calls, each of which costs microseconds
IMAGE_BYTES = 32 << 20  # of decoded images that are scored at once
ARROW_KINDS = ("numpy", "string", "integer", "floating", "boolean")  # as pandas infers them
TRUSTED = "SPARKRING_MODEL_MODULES"
CODE = "code"  # MLflow's folder for modules, next to that of the model's files; load_model puts it on Python's path


def trained_model(config: RunConfig, manifest: DatasetManifest, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Return the module with its trained weights, never compiled: a serving host may lack a compiler or time."""
    without_memory = start_model(config, manifest)
    if isinstance(without_memory, InitialModel):  # refuse sizes other than the weights' before memory is taken
        without_memory.module.load_state_dict({name: weight.to("meta") for name, weight in weights.items()})
    model = build_model(config, manifest)
    model.load_state_dict(weights)
    return model.eval()


def read_model(folder: Storage, trained: TrainedModel) -> Model:
    """Read what a model folder holds of one family: a module with its weights and tables, or trees.

    StoredError for a file that is damaged; ValueError, TypeError or RuntimeError where it fits no model.
    """
    if trained.config.model.is_trees:
        try:
            from sparkring.training.trees.model import read_trees  # XGBoost, which networks need not have
        except ImportError as error:
            remedy = "pip install 'sparkring[trees]'" if error.name == "xgboost" else "load it in a process of its own"
            raise StoredError(f"{folder.uri}: is of trees, and {error}: {remedy}") from error
        return read_trees(folder, trained.config, trained.manifest)
    model = trained_model(trained.config, trained.manifest, read_weights(folder))
    attach_tables(model, folder)
    return model


@dataclass(frozen=True)
class RawInputs:
    """What a model is fed, seen from raw rows.

    tensors: all but the label; states: of the fitted features that make some of them; plain: those that none makes,
    whose raw column has their name.
    """

    tensors: list[Column]
    states: list[State]
    plain: list[Column]

    @property
    def columns(self) -> list[str]:
        """The raw columns, each once."""
        return list(dict.fromkeys([*(state["column"] for state in self.states), *(c.name for c in self.plain)]))

    @property
    def optional(self) -> set[str]:
        """The raw columns that may be missing, as if null in every row: all made of them has learned nulls."""
        learned: dict[str, bool] = {}
        for state in self.states:
            learned[state["column"]] = learned.get(state["column"], True) and learned_nulls(state)
        return {column for column, all_learned in learned.items() if all_learned}


def raw_inputs(config: RunConfig, manifest: DatasetManifest) -> RawInputs:
    """Return the model's raw inputs. ValueError names a recipe key that the dataset does not satisfy."""
    columns = pick_columns(manifest, config.model)
    read = [manifest.tensor(name) for name in columns.read]
    tensors = [column for column in read if {column.name, column.mask} & {*columns.features}]
    wanted, states = {column.name for column in tensors}, manifest.features.get("features", [])
    made = {name for state in states for name in output_names(state)}
    used = [state for state in states if wanted & {*output_names(state)}]
    return RawInputs(tensors, used, [column for column in tensors if column.name not in made])


def learned_nulls(state: State) -> bool:
    """Return whether a feature saw nulls in training, or declares how to treat them."""
    if state["kind"] == "passthrough":
        return state["nulls"] in ("mask", "fill")
    return state.get("train_nulls", 0) > 0  # not counted of cyclic features, nor of categories by an older sparkring


class TablePredictor(ABC):
    """Predicts a table task from raw columns, as the feature fit saw them.

    `predict(rows)` gives a frame with `prediction` (binary: probability of the positive class; regression: the value)
    or one `class_<i>` column per class; of a label of texts `class_<name>`, and the likeliest name as `prediction`.
    Several labels have a probability each, `label_<name>`.
    """

    def __init__(self, config: RunConfig, manifest: DatasetManifest, calibration: Calibration | None):
        self.config, self.manifest, self.calibration = config, manifest, calibration
        self.kind = config.model.kind
        self.label_names = manifest.label_names if self.kind.has_several_labels else []
        self.raw = raw_inputs(config, manifest)
        self.refuses_null = {
            state["column"]: state["name"] for state in self.raw.states if state.get("nulls") == "refuse"
        } | {column.name: column.name for column in self.raw.plain if column.nulls == "refuse"}
        """Raw column in which no value may be null -> the feature that says so."""

    @abstractmethod
    def scores(self, rows: Mapping[str, RawColumn], count: int) -> np.ndarray:
        """Score raw columns of `count` rows: (count,) float64, or (count, classes or labels).

        An Arrow array's NaN is a value where pandas cannot say null otherwise, and a null in a feature of numbers.
        """

    @abstractmethod
    def scores_of_stored(self, rows: pa.Table) -> np.ndarray:
        """Score rows of a dataset: (rows,) float64, or (rows, classes).

        `rows` has the stored columns that this model's manifest names, whatever dataset they are of.
        """

    @property
    @abstractmethod
    def stored_columns(self) -> list[str]:
        """The columns of a dataset's files that `scores_of_stored` needs."""

    @abstractmethod
    def contributions(self, rows: Mapping[str, RawColumn], count: int) -> Contributions:
        """Explain the raw predictions of `count` rows: features are the raw columns, in the order of `raw_columns`.

        ValueError where the model's predictions have no contributions. Rows are as `scores` takes them.
        """

    @property
    def raw_columns(self) -> list[str]:
        """The raw columns that are needed."""
        return self.raw.columns

    def predict(self, model_input: Any, params: Any = None) -> pd.DataFrame:
        """Predict rows of `model_input`: a DataFrame, or a dict of equally long columns.

        KeyError names a column that is missing, unless it is optional (RawInputs), and null then. ValueError names a
        column with values of a wrong type, or a row without a finite prediction.
        """
        rows = pd.DataFrame(model_input)
        scores = self.scores(self.raw_arrays(rows), len(rows))
        check_finite(scores, rows)
        return pd.DataFrame(self.predictions(scores), index=rows.index)

    def raw_arrays(self, rows: pd.DataFrame) -> dict[str, RawColumn]:
        """Return the frame's columns in the form of `scores`."""
        nullable = {state["column"] for state in self.raw.states if state.get("nulls", "refuse") != "refuse"}
        nullable |= {column.name for column in self.raw.plain if column.nulls != "refuse"}
        missing = {name: pa.nulls(len(rows)) for name in self.raw.optional - {*rows}}
        return {name: raw_column(rows[name], name in nullable) for name in rows} | missing

    def output_names(self, found: Contributions) -> list[str]:
        """List the classes or labels with raw predictions; [] for a single prediction."""
        if self.kind.form in (LabelForm.FLAG, LabelForm.NUMBER):
            return []
        return self.label_names or self.manifest.classes or [str(number) for number in range(len(found.base))]

    def predictions(self, scores: np.ndarray) -> dict[str, np.ndarray]:
        """Return the scores as columns by name."""
        if scores.ndim == 1:
            return {"prediction": scores}
        classes = [] if self.kind.has_several_labels else self.manifest.classes
        names = self.kind.score_columns(classes, self.label_names, scores.shape[1])
        likeliest = {"prediction": np.array(classes, object)[scores.argmax(axis=1)]} if classes else {}
        return likeliest | {name: scores[:, i] for i, name in enumerate(names)}


class Predictor(TablePredictor):
    """Predicts by one model: a network, or trees."""

    def __init__(
        self, config: RunConfig, manifest: DatasetManifest, model: Model, calibration: Calibration | None = None
    ):
        manifest = seen_by(config.model, manifest)
        super().__init__(config, manifest, calibration)
        self.columns = pick_columns(manifest, config.model)
        self.task: Any = recipe_task(config.model, self.columns)
        self.model = model
        self._features = None
        if self.raw.states:
            self._features = RawFeatures(manifest.features | {"features": self.raw.states}, config.data.decoders)
        self._source = TensorSource(manifest, [column.name for column in self.raw.tensors])
        self.batch_rows = rows_at_once(self.raw.tensors)
        has_images = any(column.layout == "binary" for column in self.raw.tensors)
        self.tensor_rows = self.batch_rows if has_images else TENSOR_ROWS

    def scores(self, rows: Mapping[str, RawColumn], count: int) -> np.ndarray:
        return np.concatenate([self._probabilities(columns) for columns in self._batches(rows, count)])

    def contributions(self, rows: Mapping[str, RawColumn], count: int) -> Contributions:
        if (problem := contribution_problem(self.config, self.manifest)) is not None:
            raise ValueError(problem)
        found = joined([self._explain(columns) for columns in self._batches(rows, count)])
        return found if self.calibration is None else found.calibrated(self.calibration)

    @functools.cached_property
    def _explain(self) -> Callable[[dict[str, torch.Tensor]], Contributions]:
        """From a batch's tensors to contributions."""
        made = tensors_by_feature(self.manifest, self.columns.features)
        features = {name: made[name] for name in self.raw_columns}
        if self.config.model.is_trees:
            from sparkring.training.trees.contributions import TreesExplainer  # XGBoost, which networks need not have

            return TreesExplainer(self.model, features)  # type: ignore[arg-type]
        return NetExplainer(
            lambda columns: self.model(*self.task.inputs(columns)),
            base_row(self.manifest, self.columns.features),
            [*features.values()],
        )

    def _batches(self, rows: Mapping[str, RawColumn], count: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the tensors of `batch_rows` raw rows at a time."""
        for start, end in batches_of(count, self.tensor_rows):
            tensors = self._raw_tensors({name: values[start:end] for name, values in rows.items()})
            for a, b in batches_of(end - start, self.batch_rows):
                yield {name: tensor[a:b] for name, tensor in tensors.items()}

    def scores_of_stored(self, rows: pa.Table) -> np.ndarray:
        tables = (rows.slice(start, end - start) for start, end in batches_of(len(rows), self.batch_rows))
        return np.concatenate([self._probabilities(self._stored_tensors(table)) for table in tables])

    @property
    def stored_columns(self) -> list[str]:
        return [column.name for column in self._source.stored]

    def probabilities(self, outputs: torch.Tensor) -> torch.Tensor:
        """Convert model outputs to predictions, (rows,) or (rows, classes or labels)."""
        own: torch.Tensor = self.task.probabilities(outputs)
        return own if self.calibration is None else self.calibration(own)

    def _probabilities(self, columns: dict[str, torch.Tensor]) -> np.ndarray:
        with torch.inference_mode():
            found: np.ndarray = self.probabilities(self.model(*self.task.inputs(columns))).numpy()
        return found

    def _raw_tensors(self, rows: Mapping[str, RawColumn]) -> dict[str, torch.Tensor]:
        """Convert raw rows by the fitted features, as the dataset's reader would."""
        made: dict[str, Any] = dict(self._features.of(rows)) if self._features else {}
        columns = {}
        for column in self.raw.tensors:
            if column.name not in made:
                if column.name not in rows:
                    raise KeyError(f"column {column.name!r} is needed; given: {sorted(map(str, rows))}")
                made |= as_read(column, rows[column.name])
            columns[column.name] = as_tensor(column, made[column.name])
            if column.mask is not None:
                columns[column.mask] = torch.from_numpy(made[column.mask])
        return columns

    def _stored_tensors(self, table: pa.Table) -> dict[str, torch.Tensor]:
        """Convert stored columns to tensors as the dataset's reader does."""
        columns = {}
        for column, values, present in self._source.made(table):
            if isinstance(values, RaggedArray) and column.layout == "binary" and self._features is not None:
                values = self._features.decoded(column.name, table.column(column.name).combine_chunks())
            if isinstance(values, RaggedArray):
                raise ValueError(f"column {column.name!r} is {column.layout}: only scalars and vectors are scored here")
            columns[column.name] = as_tensor(column, values)
            if column.mask is not None:
                columns[column.mask] = torch.from_numpy(np.ones(len(values), bool) if present is None else present)
        return columns


class BlendedPredictor(TablePredictor):
    """Mixes what a network and trees predict for the same rows."""

    def __init__(self, trained: TrainedModel, blend: Blend, net: Predictor, trees: Predictor):
        super().__init__(trained.config, trained.manifest, trained.calibration)
        self.blend, self.net, self.trees = blend, net, trees

    def scores(self, rows: Mapping[str, RawColumn], count: int) -> np.ndarray:
        return self._mixed(*(part.scores(rows, count) for part in (self.net, self.trees)))

    def scores_of_stored(self, rows: pa.Table) -> np.ndarray:
        return self._mixed(*(part.scores_of_stored(rows) for part in (self.net, self.trees)))

    @property
    def stored_columns(self) -> list[str]:
        return list(dict.fromkeys([*self.net.stored_columns, *self.trees.stored_columns]))

    def contributions(self, rows: Mapping[str, RawColumn], count: int) -> Contributions:
        found = [
            part.contributions(rows, count).of_features(part.raw_columns, self.raw_columns)
            for part in (self.net, self.trees)
        ]
        blended = found[0].mixed(self.blend.share, found[1])
        return blended if self.calibration is None else blended.calibrated(self.calibration)

    def _mixed(self, net: np.ndarray, trees: np.ndarray) -> np.ndarray:
        found = self.blend.of(self.kind, net, trees)
        return found if self.calibration is None else self.calibration.of(found)


def rows_at_once(columns: Iterable[Column]) -> int:
    """Return how many rows to score at once: fewer if they have images, which need more memory."""
    image_bytes = sum(math.prod(column.shape) for column in columns if column.layout == "binary")
    return max(1, min(BATCH_ROWS, IMAGE_BYTES // max(1, image_bytes)))


def batches_of(count: int, size: int = BATCH_ROWS) -> list[tuple[int, int]]:
    """Begin and end of each batch of `size` of `count` rows; one empty batch where there are none."""
    return [(start, min(start + size, count)) for start in range(0, max(count, 1), size)]


def check_finite(scores: np.ndarray, rows: pd.DataFrame) -> None:
    """Raise ValueError where a score is not finite: the likeliest class of such a row would look like any other.

    `scores`: (rows,) or (rows, classes).
    """
    bad = np.flatnonzero(~np.isfinite(scores).all(axis=tuple(range(1, scores.ndim))))
    if not len(bad):
        return
    row = rows.iloc[bad[0]]
    given = [f"{name} = {value}" for name, value in row.items() if isinstance(value, float) and np.isinf(value)]
    raise ValueError(
        f"{len(bad)} of {count_of(len(rows), 'row has')} no finite prediction; the first is row {bad[0]}"
        f"{' with ' + ', '.join(given) if given else ''}. Numbers must be finite: null them or leave such rows out"
    )


def as_tensor(column: Column, values: np.ndarray) -> torch.Tensor:
    """Convert to (rows, *shape) of the column's dtype; images to uint8."""
    own = np.ascontiguousarray(values).astype(numpy_dtype(column), copy=False)
    return torch.from_numpy(own if own.flags.writeable else own.copy())


def raw_column(given: pd.Series, nan_is_null: bool) -> RawColumn:
    """Convert a pandas column to an Arrow array if its values have one plain type, else to a list.

    `nan_is_null`: whether a NaN among numbers is null: pandas may have no other null.
    """
    kind = "numpy" if isinstance(given.dtype, np.dtype) and given.dtype.kind in "biuf" else ""
    kind = kind or pd.api.types.infer_dtype(given, skipna=True)
    if kind in ARROW_KINDS:
        try:
            array = pa.array(given, from_pandas=nan_is_null or kind == "string")
            return array if isinstance(array, pa.Array) else one_array(array)
        except (pa.ArrowException, OverflowError):  # whole numbers beyond 64 bits
            pass
    return present(given) if nan_is_null else given.tolist()


def present(given: pd.Series) -> list[Any]:
    """Replace missing values by None: pandas has only NaN for a null among numbers."""
    values: list[Any] = given.astype(object).where(given.notna(), None).tolist()
    return values


def as_read(column: Column, given: RawColumn) -> dict[str, np.ndarray]:
    """Return a stored column and its mask, if any; nulls are filled as by the dataset's reader.

    ValueError for nulls in a column that refuses them.
    """
    values = given.to_pylist() if isinstance(given, pa.Array) else list(given)
    valid = np.array([value is not None for value in values], bool)
    if column.nulls == "refuse" and not valid.all():
        raise ValueError(
            f"column {column.name!r}: {int((~valid).sum())} of {count_of(len(valid), 'value is')} null, none may be"
        )
    fill = np.full(column.shape, column.fill if column.nulls == "fill" and column.fill is not None else 0)
    stacked = np.array([fill if value is None else value for value in values]).reshape(len(values), *column.shape)
    return {column.name: stacked} | ({column.mask: valid} if column.mask is not None else {})


class Writer:
    """Continues prompts with a language model; the same row gives the same text.

    `predict(rows)` takes a column `prompt`, optionally `tokens` (how many to add, 100) and `temperature` (0.8; 0 is
    greedy), and gives a frame with `text`, the continuation of each prompt.
    """

    def __init__(self, config: RunConfig, manifest: DatasetManifest, model: Model):
        from sparkring.etl.text.tokenizer import Codec  # here: a model of tables needs no tokenizer

        self.codec = Codec(manifest.text["tokenizer_json"], manifest.text["size"])
        self.context: int = manifest.text["seq_len"] - 1
        self.model: Any = model

    def predict(self, model_input: Any, params: Any = None) -> pd.DataFrame:
        rows = pd.DataFrame(model_input)
        if "prompt" not in rows:
            raise KeyError(f"column 'prompt' is needed; given: {sorted(map(str, rows))}")
        texts = [self._continue(row) for row in rows.to_dict("records")]
        return pd.DataFrame({"text": texts}, index=rows.index, dtype=object)

    def _continue(self, row: Mapping[Any, Any]) -> str:
        (encoded,) = self.codec.encode([row["prompt"]])
        prompt = [self.codec.end_id, *encoded[:-1].tolist()]  # as a document begins: after the end of another
        count, temperature = _given(row, "tokens", 100), _given(row, "temperature", 0.8)
        return self.codec.decode(
            generate(self.model, prompt, int(count), self.context, Sampling(temperature=float(temperature)))
        )


def _given(row: Mapping[Any, Any], name: str, default: float) -> float:
    value = row.get(name)
    return default if value is None or value != value else value


def _load_pyfunc(path: str) -> TablePredictor | Writer:
    """Load a model folder; MLflow calls this, with the model's folder of code on Python's path."""
    extend_packages(__name__.partition(".")[0])
    return load_trusted(path)


def extend_packages(top: str) -> None:
    """Make the imported packages of `top` find modules that a folder of Python's path has and theirs lacks.

    They may be those that another model brought, which carries what its own family needs only.
    """
    for name in sorted(name for name in sys.modules if name.partition(".")[0] == top):
        package = sys.modules[name]
        if hasattr(package, "__path__"):
            package.__path__ = extend_path(package.__path__, name)


def load_trusted(path: str) -> TablePredictor | Writer:
    """Load a local model folder. StoredError for one that is damaged, or names code that is not trusted here."""
    folder = open_storage(path)
    config = read_description(folder).config
    check_trusted(config, f"{path}/{CONFIG}", carried(config, Path(path)))
    return make_predictor(folder)


def carried(config: RunConfig, folder: Path) -> list[str]:
    """List the factory, task and decoder modules in the model's own code folder, on Python's path."""
    named = [module_of(each) for each in config.model_code.values()]
    on_path = {Path(place).resolve() for place in sys.path}
    codes = [parent / CODE for parent in folder.resolve().parents if parent / CODE in on_path]
    return [name for name in named if codes and _has_module(codes[0], name)]


def _has_module(code: Path, name: str) -> bool:
    place = code / name.replace(".", "/")
    return place.with_name(f"{place.name}.py").is_file() or (place / "__init__.py").is_file()


def make_predictor(folder: Storage) -> TablePredictor | Writer:
    """Load a model folder whose code is trusted. StoredError where its parts make no model."""
    trained = read_model_folder(folder)
    try:
        if trained.config.model.kind.is_text:
            return Writer(trained.config, trained.manifest, read_model(folder, trained))
        return table_predictor(folder, trained)
    except StoredError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:  # RuntimeError: torch's, of memory and of shapes
        why = " ".join(str(error).split())
        raise StoredError(
            f"{folder.uri}: config.json and manifest.json make no model for its weights: {why}"
        ) from error


def table_predictor(folder: Storage, trained: TrainedModel) -> TablePredictor:
    """Read a table's model, of one family or a blend. Raises what `read_model` raises."""
    models = [
        Predictor(part.config, part.manifest, read_model(folder, part), part.calibration) for part in trained.parts
    ]
    return models[0] if trained.blend is None else BlendedPredictor(trained, trained.blend, *models)


def check_trusted(config: RunConfig, where: str, own: Iterable[str] = ()) -> None:
    """Raise StoredError where a stored configuration names code of a module that is not trusted here, nor of `own`."""
    trusted = ("sparkring.training.models", *own, *filter(None, os.environ.get(TRUSTED, "").split(",")))
    for key, reference in config.model_code.items():
        module = module_of(reference)
        if not any(f"{module}.".startswith(f"{name}.") for name in trusted):
            raise StoredError(
                f"{where}: {key} = {reference!r}: a stored file may name code of sparkring.training.models only; if "
                f"you trust that module and have it, set {TRUSTED}={module} where the model is loaded"
            )


def signature_inputs(config: RunConfig, manifest: DatasetManifest) -> list[NamedType]:
    """Describe the raw columns that the model needs, as MLflow columns.

    A number may come as int, bool, float or None, a date as text too, and MLflow has no type for that but `any`; an
    impossible value is reported when it is read.
    """
    if manifest.text:
        return [
            {"name": "prompt", "type": "string", "required": True},
            {"name": "tokens", "type": "long", "required": False},
            {"name": "temperature", "type": "double", "required": False},
        ]
    raw, types = raw_inputs(config, manifest), manifest.features.get("inputs", {})
    return [
        {
            "name": name,
            "type": types[name] if types.get(name) in ("string", "binary") else "any",
            "required": name not in raw.optional,
        }
        for name in raw.columns
    ]


def signature_outputs(task: str, classes: Sequence[str] = (), labels: Sequence[str] = ()) -> list[NamedType]:
    """Describe the prediction's columns, if known; `classes`, `labels`: names in order of outputs."""
    columns = task_kind(task).outputs(classes, labels)
    return [{"name": name, "type": kind, "required": True} for name, kind in columns.items()]
