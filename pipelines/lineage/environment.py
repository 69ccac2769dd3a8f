"""The environment of this process: packages, torch's build, the processor, our code and the user's modules."""

from __future__ import annotations

import importlib.util
import platform
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import torch

from sparkring.conf.code import code_digest
from sparkring.conf.config import RunConfig
from sparkring.conf.digest import digest
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.references import REFERENCE, module_of
from sparkring.etl.sources.own_code import own_modules
from sparkring.pipelines.lineage.reproduce_record import Environment, ModuleFile

OURS = "sparkring"
PACKAGES = tuple(f"{OURS}.{name}" for name in ("conf", "training", "pipelines", "etl"))
VECTOR = re.compile(r"(avx|amx|fma|f16c|sse4|sve|asimd|neon)\w*")
CPUINFO = Path("/proc/cpuinfo")


def environment(config: RunConfig) -> Environment:
    """Describe what a training of this configuration would run on here. EtlError where a module cannot be found."""
    cpu = parse_cpuinfo(CPUINFO.read_text() if CPUINFO.exists() else "")
    return Environment(
        python=platform.python_version(),
        packages=installed(),
        torch_build=torch.__config__.show().splitlines(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        cpu_model=cpu[0] or platform.processor() or platform.machine(),
        cpu_flags=cpu[1],
        gpus=[torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        code={package: code_digest(package) for package in PACKAGES},
        modules=user_modules(config),
    )


def installed() -> dict[str, str]:
    """Return the version of every installed distribution, by its lower-case name."""
    found: dict[str, str] = {}
    for one in metadata.distributions():
        name = one.metadata["Name"]
        if name:  # what is left of a broken installation has none
            found.setdefault(name.lower().replace("_", "-"), one.version)
    return dict(sorted(found.items()))


def parse_cpuinfo(text: str) -> tuple[str, list[str]]:
    """Return (model, vector instruction flags) of the first processor in /proc/cpuinfo; empty if unlisted."""
    lines = [line.partition(":") for line in text.splitlines()]
    keys: dict[str, str] = {}
    for key, _, value in lines:
        keys.setdefault(key.strip().lower(), value.strip())
    flags = (keys.get("flags") or keys.get("features") or "").split()
    return keys.get("model name", ""), sorted(flag for flag in flags if VECTOR.fullmatch(flag))


def references(config: RunConfig) -> dict[str, str]:
    """Map configuration keys to the references to the user's modules they hold."""
    given = {
        "model.factory": config.model.factory,
        "model.task": config.model.task,
        "optim.name": config.optim.name,
        "optim.schedule": config.optim.schedule,
        **{f"train.hooks.{place}": hook for place, hook in enumerate(config.train.hooks)},
    }
    return {
        key: reference
        for key, reference in given.items()
        if REFERENCE.fullmatch(reference) and not is_ours(module_of(reference))
    }


def is_ours(module: str) -> bool:
    return module == OURS or module.startswith(f"{OURS}.")


def user_modules(config: RunConfig) -> dict[str, ModuleFile]:
    """Hash the user's modules that a training runs. EtlError where one is gone or is not Python any more."""
    found: dict[str, str] = {}
    for key, reference in references(config).items():
        found |= own_modules(reference, key)
    names: Iterable[str] = sorted(name for name in found if not is_ours(name))
    return {name: ModuleFile(file=file_of(name), sha256=found[name]) for name in names}


def file_of(module: str) -> str:
    spec = importlib.util.find_spec(module)
    return (spec.origin if spec is not None else None) or ""


def content_digest(manifest: DatasetManifest) -> str:
    """Hash (sha256) the rows that a manifest lists and how they are read, not their origin."""
    fields = {"columns", "splits", "features", "text"}
    files = [(file.split, file.row_groups, file.sha256) for file in manifest.files]
    return digest([manifest.model_dump(mode="json", include=fields), files])
