"""The recipe's `model` block: its class, its task, and the weights it starts with."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from sparkring.conf.blocks.predict import REGISTERED
from sparkring.conf.schema import Reference, Strict
from sparkring.conf.tasks import Families, Family, LabelForm, TaskKind, TaskName, task_kind

WEIGHTS_FILE = ".safetensors"  # ends the URI of a file of weights


class StartConfig(Strict):
    """Trained weights that a model begins with, taken over by name and shape."""

    weights: str = Field(
        description="models:/<name>@<alias>, models:/<name>/<version>, the URI of a run's `model` folder, or of a "
        ".safetensors file"
    )
    rename: dict[str, str] = Field(
        {}, description="beginning of names in the file -> beginning in the model, the longest that fits; '' fits all"
    )
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = Field(
        None, description="of the file; another one is refused. None: whatever it is; a run notes it"
    )

    @field_validator("weights")
    @classmethod
    def _known_form(cls, uri: str) -> str:
        if uri.startswith("models:") and REGISTERED.fullmatch(uri) is None:
            raise ValueError(f"{uri!r}: must be models:/<name>@<alias> or models:/<name>/<version>")
        if uri.endswith((".bin", ".pt", ".pth", ".ckpt")):
            raise ValueError(
                f"{uri!r}: such a file is a pickle, which runs code when it is read; write its tensors as "
                ".safetensors (safetensors.torch.save_file)"
            )
        return uri

    @property
    def registered(self) -> bool:
        """Whether the weights are a registered model's."""
        return self.weights.startswith("models:")


class ModelConfig(Strict):
    """The model: `factory` is `module:Class` of a torch module.

    A class with `from_manifest(manifest, **args)` is built by that (sizes of vocabularies come from the dataset),
    others by `Class(**args)`.
    """

    family: Families = Field(
        "net",
        description="net: the torch module of `factory`; trees: gradient-boosted trees of XGBoost by the block "
        "`trees`, which take every feature column of a table; both: one after the other, and the better one by "
        "train.best_metric on the validation rows is the model, or a blend of them",
    )
    blend: Literal["auto", "none"] = Field(
        "auto",
        description="of family both: auto: the model is a blend of network and trees, as near to one half of each as "
        "validation rows allow, unless one is better alone; none: it is one of the two",
    )
    factory: Reference = Field(
        "sparkring.training.models.tabular:Tabular", description="module:Class of a torch module"
    )
    args: dict[str, Any] = Field({}, description="arguments of the factory, by name")
    task: TaskName | Reference = Field(
        "binary",
        description="a built-in task, or module:Class of one of your own; it decides loss, metrics and outputs",
    )
    task_args: dict[str, Any] = Field({}, description="of a task by module:Class")
    inputs: list[str] | None = Field(
        None,
        description="columns, or masks of columns (`<name>__valid`), given to forward as positional tensors; "
        "None: one dict of all feature columns and their masks",
    )
    label: str | None = Field(
        None,
        description="label column; None: the dataset's only column with role label, or all of them, for the task "
        "multilabel and for a task of your own",
    )
    calibrate: Literal["auto", "none"] = Field(
        "auto",
        description="auto: probabilities of a binary or multiclass task are calibrated on validation rows, where that "
        "lowers the log loss of rows that it was not fitted on by more than its error; none: they stay the model's own",
    )
    start: StartConfig | None = Field(
        None, description="weights to begin with, as a block or its `weights` alone; None: initial values"
    )

    @field_validator("start", mode="before")
    @classmethod
    def _weights_alone(cls, start: Any) -> Any:
        return {"weights": start} if isinstance(start, str) else start

    @property
    def is_trees(self) -> bool:
        return self.family == "trees"

    @property
    def may_calibrate(self) -> bool:
        """Whether a calibration is wanted, and the task has probabilities of one flag or of classes."""
        return self.calibrate == "auto" and self.kind.form in (LabelForm.FLAG, LabelForm.CLASS)

    @property
    def families(self) -> tuple[Family, ...]:
        """What is trained, in order: of both the trees, which usually end sooner, come first."""
        return ("trees", "net") if self.family == "both" else (self.family,)

    @property
    def kind(self) -> TaskKind:
        """The task's description."""
        return task_kind(self.task)
