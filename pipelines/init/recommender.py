"""A project for interactions of users and items: rows held out by time, candidates drawn by SQL, lists ranked.

Follows He et al. 2017 (arXiv:1708.05031): a few items are drawn for each one that was taken, and a test user's items
are ranked among a hundred drawn ones. Differs in that rows are held out by time, not a last one of each user, and that
training never leaves out an item because it is taken later.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from sparkring.conf.plain_text import count_of
from sparkring.conf.tasks import BINARY
from sparkring.etl.sources.files.read import quoted
from sparkring.pipelines.init.columns import counts, in_sql
from sparkring.pipelines.init.folder import PREDICTIONS, Project, example_rows, python_use, run_name
from sparkring.pipelines.init.interactions import PERIOD, Interactions, Roles, decide_interactions
from sparkring.pipelines.init.remarks import null_lines
from sparkring.pipelines.init.sample import TableSample, read_sample

DRAWN, CANDIDATES = 4, 100  # items drawn for each one that was taken; for each test user
MOST_TEST_USERS = 5000  # about; chosen by hash
FEWEST_ROWS_OF_ID = 10  # an id of fewer training rows shares one embedding with all such ids
STEPS, LARGEST_BATCH, STEPS_PER_EPOCH, FEWEST_EPOCHS, MOST_EPOCHS = 2000, 4096, 8, 3, 10
SOURCE, ROWS, TO_RANK = "raw", "prepared", "to_rank"

MODULE = "factors.py"
FACTORS = '''"""The model of recipe.yaml: it is yours to change. `model.args` are the arguments of from_manifest."""

import torch
from torch import nn

from sparkring.conf.manifest import DatasetManifest


class Factors(nn.Module):
    """columns, each (rows,) -> logits (rows,): a factorization machine (Rendle 2010).

    Each value of a column has a weight and a vector of its own; each pair of columns adds the product of their vectors:
    of user and item, what the one likes and the other is.
    """

    def __init__(self, codes: dict[str, int], numbers: list[str], width: int = 16) -> None:
        super().__init__()
        self.codes, self.numbers = list(codes), numbers
        self.tables = nn.ModuleList([nn.Embedding(count, 1 + width) for count in codes.values()])
        self.of_number = nn.Parameter(torch.zeros(len(numbers), 1 + width)) if numbers else None
        self.bias = nn.Parameter(torch.zeros(()))
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.1)
            nn.init.zeros_(table.weight[:, 0])

    @classmethod
    def from_manifest(cls, manifest: DatasetManifest, width: int = 16) -> "Factors":
        """The features of the dataset: those with codes, and numbers with the marks of their nulls."""
        features = [column for column in manifest.tensors if column.role == "feature"]
        numbers = [column.name for column in features if column.cardinality is None]
        numbers += [column.mask for column in features if column.mask is not None]
        codes = {column.name: column.cardinality for column in features if column.cardinality is not None}
        return cls(codes, numbers, width)

    def forward(self, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = [table(columns[name].long()) for table, name in zip(self.tables, self.codes)]
        if self.of_number is not None:
            values = torch.stack([columns[name] for name in self.numbers], dim=1).to(self.bias.dtype)
            parts += (values[:, :, None] * self.of_number).unbind(1)
        found = torch.stack(parts, dim=1)  # (rows, columns, 1 + width)
        vectors = found[:, :, 1:]
        pairs = (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1) / 2
        return self.bias + found[:, :, 0].sum(dim=1) + pairs
'''


def recommender_project(data: str, roles: Roles, folder: Path) -> Project:
    """Inspect the interactions and choose a recipe. ConfigError where the file or its columns will not do."""
    sample = read_sample(data)
    found = decide_interactions(sample, roles)
    name = run_name(folder.resolve().name)
    return Project(
        recommender_recipe(sample, roles, found, name),
        decided(sample, found),
        look_at(sample, found),
        limit_rows=min(20_000, sample.rows.num_rows),
        use=_use(sample, roles, found, name),
        files={MODULE: FACTORS},
        has_code=True,
    )


def recommender_recipe(sample: TableSample, roles: Roles, found: Interactions, name: str) -> dict[str, Any]:
    """Make the recipe, as a dict in the order it is written."""
    used = {*roles.named.values(), *(column for facts in found.facts.values() for column in facts.values())}
    batch, epochs = batch_and_epochs(sample.rows.num_rows * (1 + DRAWN * found.is_drawn))
    names = (found.user, found.item, PERIOD, found.label.name)
    known = " AND ".join(f"{in_sql(name)} IS NOT NULL" for name in names)
    id_feature = {"kind": "categorical", "min_count": FEWEST_ROWS_OF_ID}
    views = drawn_views(roles, found) if found.is_drawn else shown_views(roles, found)
    return {
        "name": name,
        "etl": {
            "sources": {SOURCE: sample.source(used)},
            "views": views | {TO_RANK: f"SELECT * FROM {ROWS} WHERE {PERIOD} = 'test'\n"},
            "rows": ROWS,
            **({"key": [found.user, found.item, PERIOD]} if found.is_drawn else {}),
            "checks": [{"name": "known", "kind": "expression", "sql": known, "level": "row"}],
            "split": {"kind": "column", "column": PERIOD},
            "features": {found.user: id_feature, found.item: dict(id_feature)} | found.features,
            "label": found.label.name,
        },
        "model": {"factory": "factors:Factors", "task": BINARY.name, "args": {"width": 16}},
        "optim": {"lr": 0.02, "weight_decay": 0.1},
        "train": {"epochs": epochs, "global_batch": batch},
        "report": {"ranking": {"group": found.user, "item": found.item, "k": [10]}},
        "predict": {"rows": TO_RANK, "keep": [found.user, found.item], "to": PREDICTIONS},
    }


def batch_and_epochs(rows: int) -> tuple[int, int]:
    """Choose a batch of which an epoch has several, and epochs for about STEPS steps."""
    batch = LARGEST_BATCH
    while batch * STEPS_PER_EPOCH > rows and batch > 2:
        batch //= 2
    return batch, min(max(round(STEPS * batch / rows), FEWEST_EPOCHS), MOST_EPOCHS)


def period(found: Interactions, time: str) -> str:
    """Return SQL of the split that a time is in; null for null."""
    return (
        f"CASE\n    WHEN {time} >= {found.test_from} THEN 'test'\n    WHEN {time} >= {found.valid_from} THEN 'valid'\n"
        f"    WHEN {time} IS NOT NULL THEN 'train'\n  END"
    )


def shown_views(roles: Roles, found: Interactions) -> dict[str, str]:
    """Make the view of a file whose rows tell whether the item was taken."""
    columns = {found.user: roles.user, found.item: roles.item} | found.facts["row"]
    selected = [*(named(column, name) for name, column in columns.items())]
    selected.append(f"{found.label.sql} AS {in_sql(found.label.name)}")
    selected.append(f"{period(found, quoted(roles.time))} AS {PERIOD}")
    return {ROWS: "SELECT\n  " + ",\n  ".join(selected) + f"\nFROM {SOURCE}\n"}


def drawn_views(roles: Roles, found: Interactions) -> dict[str, str]:
    """Make the views of a file with only taken items: others are drawn next to each, by hashes of it."""
    user, item, label = in_sql(found.user), in_sql(found.item), found.label.name
    chosen = chosen_users(found)
    source = [quoted(column) for column in (roles.user, roles.item, roles.time)]
    first_seen = (
        f"SELECT\n  {named(roles.user, found.user)},\n  {named(roles.item, found.item)},\n"
        f"  {period(found, f'min({source[2]})')} AS {PERIOD}\n"
        f"FROM {SOURCE}\nWHERE {' AND '.join(f'{column} IS NOT NULL' for column in source)}\n"
        f"GROUP BY {source[0]}, {source[1]}\n"
    )
    catalog = (
        f"SELECT {item}, row_number() OVER (ORDER BY {item}) - 1 AS place\n"
        f"FROM (SELECT DISTINCT {item} FROM first_seen WHERE {PERIOD} = 'train')\n"
    )
    asked = (
        f"SELECT {user}, {item} AS beside, number, {PERIOD}\n"
        f"FROM first_seen LATERAL VIEW explode(sequence(1, {DRAWN})) AS number\nWHERE {PERIOD} <> 'test'\n"
        f"UNION ALL\nSELECT {user}, NULL AS beside, number, 'test' AS {PERIOD}\n"
        f"FROM (SELECT DISTINCT {user} FROM first_seen WHERE {PERIOD} = 'test'{f' AND {chosen}' if chosen else ''})\n"
        f"LATERAL VIEW explode(sequence(1, {CANDIDATES})) AS number\n"
    )
    places = f"pmod(xxhash64({user}, beside, number, {PERIOD}), (SELECT count(*) FROM catalog))"
    drawn = (
        f"SELECT DISTINCT {user}, {item}, {PERIOD}\n"
        f"FROM (\n  SELECT {user}, {PERIOD},\n    {places} AS place\n  FROM asked\n) JOIN catalog USING (place)\n"
    )
    negatives = (
        f"SELECT d.* FROM drawn d LEFT ANTI JOIN first_seen s\n"
        f"ON s.{user} = d.{user} AND s.{item} = d.{item}\n"
        f"AND (s.{PERIOD} IN ('train', d.{PERIOD}) OR d.{PERIOD} = 'test')\n"
    )
    kept = f"\nWHERE {PERIOD} <> 'test' OR {chosen}" if chosen else ""
    prepared = (
        f"SELECT *\nFROM (\n  SELECT {user}, {item}, {PERIOD}, 1 AS {label} FROM first_seen{kept}\n"
        f"  UNION ALL\n  SELECT {user}, {item}, {PERIOD}, 0 AS {label} FROM negatives\n)\n"
    )
    views = {"first_seen": first_seen, "catalog": catalog, "asked": asked, "drawn": drawn, "negatives": negatives}
    for of, (name, column) in {"item": (item, source[1]), "user": (user, source[0])}.items():
        if facts := found.facts[of]:
            values = "".join(f",\n  max({quoted(c)}) AS {in_sql(n)}" for n, c in facts.items())
            views[f"{of}_facts"] = f"SELECT\n  {column} AS {name}{values}\nFROM {SOURCE}\nGROUP BY {column}\n"
            prepared += f"LEFT JOIN {of}_facts USING ({name})\n"
    return views | {ROWS: prepared}


def chosen_users(found: Interactions) -> str:
    """Return SQL that chooses about MOST_TEST_USERS of the test users; "" if there are no more."""
    if found.test_users <= MOST_TEST_USERS:
        return ""
    return f"pmod(xxhash64({in_sql(found.user)}), 1000) < {math.ceil(1000 * MOST_TEST_USERS / found.test_users)}"


def named(column: str, name: str) -> str:
    """Return SQL of a column under the recipe's name."""
    return in_sql(name) if name == column else f"{quoted(column)} AS {in_sql(name)}"


def decided(sample: TableSample, found: Interactions) -> list[str]:
    """List what was decided, a sentence each."""
    seen = (
        f"{count_of(sample.rows.num_rows, 'row', ',')} looked "
        f"at{'' if sample.is_whole else ', the first; there are more'}"
    )
    lines = [
        f"{seen}: {count_of(found.users, 'user', ',')} ({found.user}), {count_of(found.items, 'item', ',')} "
        f"({found.item})",
        f"label {found.label.name}: {found.label.why}",
        f"held out by time: valid from {found.valid_from} on, test from {found.test_from} on",
    ]
    if found.is_drawn:
        lines += [
            "a user and an item are one row, in the period of their first interaction: what is ranked is new to a user",
            f"beside each, up to {DRAWN} items are drawn that the user has not taken until then, of those taken in "
            "training, by hashes, so always the same ones",
            f"for each test user up to {CANDIDATES} items are drawn that the user never takes; recall and NDCG at 10 "
            "rank them with those that are taken",
        ]
        if chosen := chosen_users(found):
            lines.append(
                f"of {count_of(found.test_users, 'test user', ',')} about {MOST_TEST_USERS:,} are looked at: {chosen}"
            )
    lines.append(f"features: {found.user} and {found.item}; others: {counts(found.features) or 'none'}")
    lines.append(f"the model is {MODULE}, a factorization machine: a vector for each user, item and value")
    lines += null_lines(sample, [name for name in sample.types if name not in found.left_out])
    return lines + [f"left out: {name} ({why})" for name, why in found.left_out.items()]


def look_at(sample: TableSample, found: Interactions) -> list[str]:
    """List what only a person can know, a sentence each."""
    lines = []
    if found.features:
        lines.append(
            "is every feature known when a list is made? One that is written later makes scores that do not last"
        )
    if found.unknown:
        lines.append(f"{count_of(found.unknown, 'row')} without user, item or time: left out")
    if found.is_drawn:
        lines.append("a probability is that among drawn items: it orders a list, and is no share of what will be taken")
        lines.append("the report compares splits: test users have more drawn rows, so fewer of theirs are taken")
    if not sample.is_whole:
        lines.append("rows that were not looked at may hold other types; the run names each such value")
    return lines


def example_row(sample: TableSample, roles: Roles, found: Interactions) -> dict[str, Any]:
    """Return user, item and features of the first row of the file, by their names in the recipe."""
    first = sample.rows.slice(0, 1).to_pylist()[0]
    columns = {found.user: roles.user, found.item: roles.item}
    for facts in found.facts.values():
        columns |= facts
    return {name: first[column] for name, column in columns.items()}


def _use(sample: TableSample, roles: Roles, found: Interactions, name: str) -> str:
    return (
        f"`sparkring predict recipe.yaml` scores the rows of the view `{TO_RANK}` and writes `{PREDICTIONS}`: order\n"
        f"each user's rows by `prediction`. To rank other items, change that view. The trained model is\n"
        f"`models:/{name}@champion`. It gives a score per row:\n\n"
        f"{python_use(name, example_rows(example_row(sample, roles, found)))}\n\n"
        "With `must_beat: [ndcg_at_10]` in the recipe's `report`, a model that is no better than popularity does not\n"
        "become the champion."
    )
