"""Find and read a cluster's file: a built-in one by name, or any by its path.

`extends: NAME` at its top takes over another file, built-in or of the same folder, whose blocks are merged by key.
"""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from sparkring.conf.bounded_yaml import parse_yaml
from sparkring.conf.clusters.cluster import Cluster
from sparkring.conf.errors import ConfigError
from sparkring.conf.load import problem_line
from sparkring.conf.recipe_file import EXTENDS, is_path
from sparkring.conf.rules.rule import nearest

CLUSTERS: Traversable = files(__package__)
RATES = {"name", "type", "peak_tflops", "memory_gb_per_s", "processors"}  # of a device, by which steps take so long
MOST_FILES = 8  # that extend each other


def cluster_names() -> list[str]:
    """List the names of the built-in clusters, sorted."""
    return sorted(p.name.removesuffix(".yaml") for p in CLUSTERS.iterdir() if p.name.endswith(".yaml"))


def load_cluster(name: str) -> Cluster:
    """Read a cluster by name (`a100-80gb-efa`) or path (`mine.yaml`). ConfigError with every problem."""
    values = _merged_values(name, Path(), ())
    try:
        return Cluster.model_validate(values)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise ConfigError(name, [problem_line(each, values, {}, Cluster) for each in found]) from None


def cluster_text(cluster: Cluster) -> str:
    """Return the cluster as YAML text that `load_cluster` reads back."""
    return yaml.safe_dump(cluster.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def _merged_values(name: str, folder: Path, above: tuple[str, ...]) -> dict[str, Any]:
    """Merge a file's values over the values of the file it extends."""
    source, inside = _find(name, folder, above)
    try:
        values, _ = parse_yaml(source.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise yaml.YAMLError("a cluster is a mapping of keys to values")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(name, [f"not valid YAML: {error}"]) from None
    base = values.pop(EXTENDS, None)
    if base is None:
        return values
    if name in above or len(above) > MOST_FILES:
        raise ConfigError(name, [f"extends: {base}: the files extend each other in a circle"])
    return _with_basis(_merge(_merged_values(str(base), inside, (*above, name)), values), values)


def _with_basis(merged: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Drop the inherited fit where the file changes the device or the reached shares.

    `own`: the values in the file itself.

    `own`: what the file itself says.
    """
    device = own.get("device")
    is_other = "reached" in own or (isinstance(device, dict) and not RATES.isdisjoint(device))
    if is_other and "fitted_on" not in own:
        return merged | {"fitted_on": "", "error": own.get("error")}
    return merged


def _find(name: str, folder: Path, above: tuple[str, ...]) -> tuple[Traversable, Path]:
    """Find the file, and the folder in which to look up the file it extends."""
    source: Traversable = folder / name if is_path(name) else CLUSTERS / f"{name}.yaml"
    if source.is_file():
        return source, (folder / name).parent
    known = f"there are {', '.join(cluster_names())}, and files by their path"
    hint = f"no such file in {folder.resolve()}; {known}" if is_path(name) else nearest(name, cluster_names(), known)
    where = f" (extended by {above[-1]})" if above else ""
    raise ConfigError(name, [f"no such cluster{where}; {hint}"])


def _merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    made = dict(under)
    for key, value in over.items():
        below = made.get(key)
        made[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return made
