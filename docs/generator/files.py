"""The page of stored files, from the models that read them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from generator.messages import fields_table
from generator.source import Definition, code, prose

FILES = {  # file -> (its folder, the class that reads it; `module.Class` where two have the name)
    "_manifest.json": ("a dataset", "DatasetManifest"),
    "_part.json": ("a part of a window", "Part"),
    "statistics": ("a part of a window: metadata of its Parquet file", "_Header"),
    "run.json": ("a run", "RunRecord"),
    "summary.json": ("a run", "TrainResult"),
    "reproduce.json": ("a run", "Record"),
    "trained.json": ("a run of several families: a family's folder", "TrainedFile"),
    "history.json": ("a run", "loss_history._File"),
    "threads.json": ("a run", "ThreadsFile"),
    "start.json": ("a run", "StartDecision"),
    "model_start.json": ("a run", "ModelStart"),
    "tables.json": ("a model", "TablesFile"),
    "blend.json": ("a model that is a blend of two families", "Blend"),
    "COMMIT.json": ("a checkpoint", "Marker"),
    "index.json": ("a checkpoint", "Index"),
    "trainer.json": ("a checkpoint", "TrainerFile"),
    "rank-00000.json": ("a checkpoint", "RankFile"),
    "order": ("a checkpoint: within trainer.json", "OrderState"),
    "audit records": ("a run, with data.audit: the first line of each file", "AuditHeader"),
    "server events": ("a run on parameter servers: the first line of each file", "LogHeader"),
    "_predictions.json": ("published predictions", "PublishedPredictions"),
    "state.json of a date": ("the ledger of a schedule", "DateRecord"),
    "lease.json": ("the ledger of a schedule", "LeaseState"),
    "last_outcome.json": ("the ledger of a recipe", "LastOutcome"),
    "ops.jsonl": ("the journal of a job, one operation a line", "_Op"),
    "state.json of a journal": ("the journal of a job", "State"),
    "sent.json": ("the journal of a job", "Sent"),
}


def is_stored(each: Definition) -> bool:
    """Whether a class is a strict model of a stored file."""
    if not isinstance(each.node, ast.ClassDef):
        return False
    marks = [ast.unparse(node) for node in (*each.node.decorator_list, *each.node.body)]
    return "Stored" in each.bases or bool({"with_config(CLOSED)", "__pydantic_config__ = CLOSED"} & {*marks})


def reader(known: list[Definition], name: str) -> Definition:
    """The class of FILES; LookupError if there is not exactly one."""
    module, _, last = name.rpartition(".")
    found = [each for each in known if each.name == last and each.module.endswith(module)]
    if len(found) != 1:
        raise LookupError(f"{len(found)} classes are {name}, not one: mend FILES in docs/generator/files.py")
    return found[0]


def nested(known: list[Definition], each: Definition) -> Iterator[Definition]:
    """The stored classes that it is made of, that its fields name, its subclasses, and those that these name."""
    bases = [base for base in known if base.name in each.bases and base.module == each.module]
    names = re.findall(r"\w+", " ".join(member.annotation for one in (each, *bases) for member in one.members()))
    for found in known:
        of_field = found.name in names and (is_stored(found) or "TypedDict" in found.bases)
        is_kind = each.name in found.bases and found.module == each.module
        if found is not each and (of_field or is_kind):
            yield found
            yield from nested(known, found)
    yield from filter(is_stored, bases)


def page(known: list[Definition]) -> str:
    """The whole page."""
    text = [
        "# Stored files\n",
        "What a stored JSON file holds. Each is read by one strict model: an unknown key, another type, or a newer "
        "format is an error that names the file. Checkpoints, file by file: "
        "[checkpoints](../explanation/checkpoints.md); what a dataset holds: [ETL](../how-to/etl.md).\n",
    ]
    shown: set[int] = set()
    for file, (folder, name) in FILES.items():
        root = reader(known, name)
        text += [f"## {file}\n", f"In {folder}. {prose(root.doc)}\n"]
        for each in (root, *nested(known, root)):
            if id(each) in shown or each.name in root.bases:  # whose fields are the root's
                continue
            shown.add(id(each))
            if each is not root:
                text += [f"{code(each.name)}: {prose(each.doc)}\n"]
            text.append(fields_table(each, known))
    return "\n".join(text)
