"""Commands about a recipe, which start nothing: init, config."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, get_args

from sparkring.conf.tasks import TABLE_TASKS, Families
from sparkring.pipelines.cli.arguments import Commands, add_command, add_group, add_recipe_command, load, show_examples
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.run.installed import has_spark

if TYPE_CHECKING:
    from sparkring.conf.blocks.etl import EtlConfig


def add_commands(commands: Commands) -> None:
    _add_init(commands)
    config, what = add_group(commands, "config", "show, validate or describe a configuration", "WHAT")
    text = "resolved values, each with where it came from"
    add_recipe_command(what, "show", _show, text, ["sparkring config show flights train.epochs=5"])
    text = "find what is wrong with a recipe, its code, tables and storage; starts no Spark; every problem at once"
    examples = ["sparkring config validate mine.yaml", "sparkring config validate mine.yaml --no-tables"]
    validate = add_recipe_command(what, "validate", _validate, text, examples)
    validate.add_argument("--no-tables", action="store_true", help="only the recipe and its code: the tables are away")
    text = "JSON schema of a recipe, for editors"
    add_command(what, "schema", _schema, text, ["sparkring config schema > recipe.schema.json"])
    show_examples(config, what)


def _add_init(commands: Commands) -> None:
    text = "write a recipe for files of your own, with a README, into a new folder"
    init, kinds = add_group(commands, "init", text, "KIND")
    text = "a recipe for CSV or Parquet: the label's task, features by type and values, what to look at"
    examples = [
        "sparkring init table --data houses.csv --label price",
        "sparkring init table churn --data customers.parquet --label churned --task binary",
        "sparkring init table films --data films.csv --label comedy,drama,crime",
    ]
    table = add_command(kinds, "table", _init_table, text, examples)
    text = "a recipe for a folder of text files: a small GPT learns to continue them"
    documents = add_command(kinds, "text", _init_text, text, ["sparkring init text notes --data ~/notes"])
    text = "a recipe for folders of images, one per class, and a small convolutional network to change"
    images = add_command(kinds, "images", _init_images, text, ["sparkring init images flowers --data photos"])
    text = "a recipe for users, items and times: rows held out by time, items drawn beside them, lists ranked"
    examples = [
        "sparkring init recommender --data ratings.csv --user user_id --item movie_id --time rated_at",
        "sparkring init recommender shop --data shown.parquet --user u --item product --time at --label clicked",
    ]
    interactions = add_command(kinds, "recommender", _init_recommender, text, examples)
    show_examples(init, kinds)
    for sub in (table, documents, images, interactions):
        sub.add_argument(
            "folder",
            nargs="?",
            help="new or empty; default: one here, named as the data (or <data>-recipe beside a folder of data)",
        )
    table.add_argument("--data", required=True, metavar="FILE", help="CSV or Parquet file, or a folder of them")
    documents.add_argument("--data", required=True, metavar="FOLDER", help="text files, a document each")
    images.add_argument("--data", required=True, metavar="FOLDER", help="a folder of image files per class")
    interactions.add_argument("--data", required=True, metavar="FILE", help="CSV or Parquet file, or a folder of them")
    interactions.add_argument("--user", required=True, metavar="COLUMN", help="who: an id")
    interactions.add_argument("--item", required=True, metavar="COLUMN", help="what: an id")
    interactions.add_argument("--time", required=True, metavar="COLUMN", help="when: a date, a timestamp or a number")
    text = "whether the item was taken, or how well liked; default: every row is an item taken, and others are drawn"
    interactions.add_argument("--label", metavar="COLUMN", help=text)
    table.add_argument("--label", required=True, metavar="COLUMN[,..]", help="what is to be predicted")
    table.add_argument("--task", choices=TABLE_TASKS, help="default: by the label's type and values")
    text = (
        "what is trained: a network, gradient-boosted trees, or both, of which the better one or a blend is the model; "
    )
    text += "default: both where the extra sparkring[trees] is installed, which trees need, else net"
    table.add_argument("--family", choices=get_args(Families), help=text)


def _init_table(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.init.folder import target_folder, write_project
    from sparkring.pipelines.init.table import table_project

    folder = target_folder(arguments.folder, arguments.data)
    project = table_project(arguments.data, arguments.label, arguments.task, folder, arguments.family)
    print("\n".join(write_project(folder, project, ["sparkring", *sys.argv[1:]])))
    return Exit.OK


def _init_text(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.init.folder import target_folder, write_project
    from sparkring.pipelines.init.text import text_project

    folder = target_folder(arguments.folder, arguments.data)
    project = text_project(arguments.data, folder)
    print("\n".join(write_project(folder, project, ["sparkring", *sys.argv[1:]])))
    return Exit.OK


def _init_images(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.init.folder import target_folder, write_project
    from sparkring.pipelines.init.images import images_project

    folder = target_folder(arguments.folder, arguments.data)
    project = images_project(arguments.data, folder)
    print("\n".join(write_project(folder, project, ["sparkring", *sys.argv[1:]])))
    return Exit.OK


def _init_recommender(arguments: argparse.Namespace) -> int:
    from sparkring.pipelines.init.folder import target_folder, write_project
    from sparkring.pipelines.init.interactions import Roles
    from sparkring.pipelines.init.recommender import recommender_project

    folder = target_folder(arguments.folder, arguments.data)
    roles = Roles(arguments.user, arguments.item, arguments.time, arguments.label)
    project = recommender_project(arguments.data, roles, folder)
    print("\n".join(write_project(folder, project, ["sparkring", *sys.argv[1:]])))
    return Exit.OK


def _show(arguments: argparse.Namespace) -> int:
    from sparkring.conf.rules.recipe import leaves

    resolved = load(arguments)
    rows = [(key, json.dumps(value), resolved.origins[key]) for key, value in leaves(resolved.as_dict())]
    widths = [min(max(len(row[i]) for row in rows), 60) for i in range(2)]
    for key, value, origin in rows:
        print(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {origin}")
    print(f"digest {resolved.digest}")
    return Exit.OK


def _validate(arguments: argparse.Namespace) -> int:
    resolved = load(arguments)
    from sparkring.pipelines.validate.recipe import validate  # imports torch: not for a key that is misspelt

    validate(resolved.config, tables=not arguments.no_tables).raise_any(arguments.recipe)
    note = _not_looked_at(resolved.config.etl, not arguments.no_tables)
    print(f"{arguments.recipe}: valid, digest {resolved.digest}{note}")
    return Exit.OK


def _not_looked_at(etl: EtlConfig | None, tables: bool) -> str:
    """Name the errors of an etl block that only a job finds; "" if none. `tables`: whether tables were read."""
    if etl is None:
        return ""
    if not has_spark():
        return "; its etl block was not looked at: pyspark, which knows its types, is not installed"
    if not tables:
        return "; its tables were not looked at"
    return "; the tables' rows were not read: `sparkring etl` checks each, and finds files that are damaged further in"


def _schema(_: argparse.Namespace) -> int:
    from sparkring.conf.load import json_schema

    print(json.dumps(json_schema(), indent=1))
    return Exit.OK
