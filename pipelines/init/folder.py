"""Write a new project: a recipe, its README and code, into a folder that is empty or not there yet."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sparkring.conf.bounded_yaml import parse_yaml
from sparkring.conf.load import ConfigError

RECIPE = "recipe.yaml"
PREDICTIONS = "data/predictions"  # folder, below the project's


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines, such as SQL, as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None if _is_text(text) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _is_text(text: str) -> bool:
    """Return whether a recipe reads the bare text as text: `1e999` is a number there, but not in YAML 1.1."""
    try:
        return bool(parse_yaml(text)[0] == text)
    except yaml.YAMLError:
        return True  # PyYAML quotes it by itself


_Dumper.add_representer(str, _text)


@dataclass(frozen=True)
class Project:
    """What `sparkring init` writes and says. `decided` and `look_at`: a sentence each; `files`: text by name.

    `comments`: other ways than those of the recipe, which has them as comments.
    """

    recipe: dict[str, Any]
    decided: list[str]
    look_at: list[str]
    limit_rows: int
    use: str  # Markdown on how to use the trained model
    files: dict[str, str] = field(default_factory=dict)
    comments: list[str] = field(default_factory=list)
    has_code: bool = False  # so Python must look into the folder


def run_name(text: str) -> str:
    """Make a name of a run from any text: lower case, digits, - and _."""
    name = re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-_")
    return name or "mine"


def folder_of(given: str | None, data: str) -> Path:
    """Return the project's folder: the given one, else one here, named as the data."""
    name = run_name(Path(data).name.partition(".")[0])
    beside = Path(f"{name}-recipe") if Path(name).resolve() == Path(data).resolve() else Path(name)
    return Path(given) if given else beside


def target_folder(given: str | None, data: str) -> Path:
    """Return the project's folder, which is new or empty. ConfigError where it has files."""
    folder = folder_of(given, data)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(str(folder), ["is there and not empty; name a new folder: sparkring init KIND FOLDER ..."])
    return folder


def write_project(folder: Path, project: Project, command: Sequence[str]) -> list[str]:
    """Write the files, and return the lines that say what was decided and what to run next.

    Args:
        folder: made if it is not there.
        project: what to write.
        command: the words that made it, for the recipe's first line.
    """
    files = project_files(folder, project, command)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        with (folder / name).open("x", encoding="utf-8") as file:  # x: never over a file that is there
            file.write(text)
    return [
        f"wrote {', '.join(str(folder / name) for name in files)}",
        *["", "decided:", *bullets(project.decided)],
        *(["", "look at:", *bullets(project.look_at)] if project.look_at else []),
        *["", "next:", *(f"  {line}" for line in [f"cd {folder}", *next_commands(project)])],
    ]


def near_path(path: str, folder: Path) -> str:
    """Return a path relative to the recipe's folder where the data is next to it or inside, so that both can move."""
    folder = folder.resolve()
    if folder.parent.parent == folder.parent or not Path(path).is_relative_to(folder.parent):
        return path
    inside = Path(path).is_relative_to(folder)
    return f"./{Path(path).relative_to(folder)}" if inside else f"../{Path(path).relative_to(folder.parent)}"


def project_files(folder: Path, project: Project, command: Sequence[str]) -> dict[str, str]:
    """Return the text of each file by its name. `command`: the words that made it, for the recipe's first line."""
    for source in project.recipe["etl"]["sources"].values():
        source["path"] = near_path(source["path"], folder)
    head = [f"# Written by: {shlex.join(command)}", *(f"# {line}" for line in project.decided)]
    head += [f"# {line}" for comment in project.comments for line in comment.split("\n")]
    body = yaml.dump(
        project.recipe, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True
    )
    return {RECIPE: "\n".join(head) + f"\n{body}", "README.md": readme(project)} | project.files


def python_use(name: str, rows: list[str]) -> str:
    """Return Markdown with Python code that asks the model for predictions. `rows`: lines that make `rows`."""
    lines = [
        "import mlflow",
        "import pandas as pd",
        "",
        'mlflow.set_tracking_uri("sqlite:///data/mlflow/mlflow.db")',
        f'model = mlflow.pyfunc.load_model("models:/{name}@champion")',
        *rows,
        "print(model.predict(rows))",
    ]
    return "\n".join(["```python", *lines, "```"])


def example_rows(values: Mapping[str, Any]) -> list[str]:
    """Return Python lines that make a frame of one row."""
    shown = {name: None if value != value else value for name, value in values.items()}  # NaN is no name of Python's
    return ["rows = pd.DataFrame([{", *(f"    {name!r}: {value!r}," for name, value in shown.items()), "}])"]


def bullets(lines: Sequence[str]) -> list[str]:
    return [f"- {line}" for line in lines]


def next_commands(project: Project) -> list[str]:
    """List the commands of a first hour, in order."""
    path = ["export PYTHONPATH=$PWD   # so that Python finds the model, on the workers too"] if project.has_code else []
    predict = project.recipe.get("predict")
    return [
        *path,
        f"sparkring config validate {RECIPE}   # what is wrong, without Spark: seconds",
        f"sparkring run {RECIPE} --limit-rows {project.limit_rows}   # every part on some rows: a minute",
        f"sparkring run {RECIPE}",
        *([f"sparkring predict {RECIPE}   # writes {predict['to']}"] if predict else []),
        f"sparkring serve-check models:/{project.recipe['name']}@champion   # installs the model again, and compares",
        f"sparkring ui {RECIPE}   # runs, charts and models in the browser",
    ]


def readme(project: Project) -> str:
    """Write the project's page: decisions, what to check, what to run, how to use the model."""
    name = project.recipe["name"]
    sections = [
        f"# {name}",
        "A recipe for sparkring. Run in this folder:",
        "```\n" + "\n".join(next_commands(project)) + "\n```",
        "What was decided (change it in `recipe.yaml`; `sparkring config schema` lists every key):",
        "\n".join(bullets(project.decided)),
    ]
    if project.look_at:
        sections += ["Look at this before you trust a model:", "\n".join(bullets(project.look_at))]
    return "\n\n".join([*sections, project.use]) + "\n"
