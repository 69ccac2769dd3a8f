"""What is counted and measured of rows while they are written. Profiles of parts add up to that of all rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.features import State
from sparkring.conf.manifest import Column
from sparkring.etl.checks import Checked, add
from sparkring.etl.classes import ClassCounts, added, fit_label, label_state, text_label
from sparkring.etl.columns.fit import fit
from sparkring.etl.columns.statistics import Statistics, merge
from sparkring.etl.flags import fit_flags, flags_state, several_labels
from sparkring.etl.split import UNDIVIDED
from sparkring.etl.weights import fit_weight


@dataclass(frozen=True)
class Profile:
    """What is known of some rows.

    `statistics`: of the rows that features may be fitted on; None if there are no such rows, and of text. `classes`:
    of a label of texts, or of several labels, with their `odd` rows. `weighted`: rows of a weight above 0 by split,
    where rows have weights.
    """

    checked: Checked
    statistics: Statistics | None = None
    classes: ClassCounts = field(default_factory=dict)
    odd: Mapping[str, int] = field(default_factory=dict)
    weighted: Mapping[str, int] = field(default_factory=dict)

    def in_split(self, split: str | None) -> Profile:
        """Return the profile with all rows in one split; itself for None, where each row has its own."""
        if split is None:
            return self
        rows = self.checked.splits
        return replace(
            self,
            checked=replace(self.checked, splits={split: rows[UNDIVIDED]} if rows else {}),
            classes=added({split: counts} for counts in self.classes.values()),
            weighted={split: sum(self.weighted.values())} if self.weighted else {},
        )


NO_ROWS = Profile(Checked(0, {}, {}, {}))


def merged(profiles: Sequence[Profile]) -> Profile:
    """Add the profiles of day partitions, at least one, that have no row in common."""
    odd, weighted = Counter[str](), Counter[str]()
    for one in profiles:
        odd.update(one.odd)
        weighted.update(one.weighted)
    measured = [one.statistics for one in profiles if one.statistics is not None]
    return Profile(
        add(one.checked for one in profiles),
        merge(measured) if measured else None,
        added(one.classes for one in profiles),
        odd,
        weighted,
    )


def fit_state(profile: Profile, columns: Sequence[Column], inputs: dict[str, str], config: EtlConfig) -> State:
    """Fit the feature state of a dataset; {} for text.

    Args:
        profile: profile of all rows of the dataset.
        columns: columns that are stored.
        inputs: Spark type by feature column.
        config: the etl block of the recipe.
    """
    if profile.statistics is None:
        return {}
    return (
        fit(profile.statistics, config.features, inputs)
        | fit_label(columns, profile.classes, config.classes)
        | fit_flags(columns, profile.classes, profile.odd)
        | fit_weight(config.weight, profile.statistics)
    )


def unfitted_labels(columns: Sequence[Column], profile: Profile, declared: Sequence[str] | None) -> State:
    """Return the labels of a feature state before a row is written. `declared`: classes, where they are listed."""
    label, several = text_label(columns), several_labels(columns)
    state: State = {} if label is None else {"labels": [label_state(label, profile.classes, declared)]}
    return state | ({"flags": flags_state(several, {}, profile.odd)} if several else {})
