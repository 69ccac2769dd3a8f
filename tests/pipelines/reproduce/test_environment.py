"""What of packages, processor and modules is recorded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from sparkring.conf.config import RunConfig
from sparkring.etl.errors import EtlError
from sparkring.pipelines.lineage.environment import (
    content_digest,
    installed,
    parse_cpuinfo,
    references,
    user_modules,
)
from tests.helpers.datasets import unread_file
from tests.pipelines.served import manifest

NET, PARTS = "reproduced_net", "reproduced_parts"


def config(**model: str) -> RunConfig:
    return RunConfig.model_validate({"name": "b", "dataset": "d", "model": model})


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of the user's that imports another one, and installed packages."""
    (tmp_path / f"{NET}.py").write_text(f"import json\nimport numpy\nfrom {PARTS} import Net\n")
    (tmp_path / f"{PARTS}.py").write_text("class Net:\n    width = 4\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in (NET, PARTS):
        sys.modules.pop(name, None)


def test_packages_are_named_with_their_versions() -> None:
    found = installed()
    assert found["torch"] == metadata.version("torch") and found["pydantic-core"] == metadata.version("pydantic_core")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("model name\t: Xeon\nflags\t\t: fpu avx2 sse2 fma avx512f\n\nmodel name\t: other\n",
         ("Xeon", ["avx2", "avx512f", "fma"])),
        ("Features\t: fp asimd sve crc32\n", ("", ["asimd", "sve"])),
        ("", ("", [])),
    ],
)  # fmt: skip
def test_the_first_processors_vector_instructions_are_read(text: str, found: tuple[str, list[str]]) -> None:
    assert parse_cpuinfo(text) == found


def test_only_references_to_modules_of_the_user_are_theirs() -> None:
    assert references(config()) == {}
    assert references(config(factory="training.models.gpt:GPT", task="language_model")) == {}
    mine = {"model.factory": f"{NET}:Net", "model.task": "tasks_of_mine:Task"}
    own = config(factory=mine["model.factory"], task=mine["model.task"])
    assert references(own) == mine
    others = {"optim.name": "mine:Optimizer", "optim.schedule": "mine:rate", "train.hooks.0": "mine:Hook"}
    optim = own.optim.model_copy(update={"name": "mine:Optimizer", "schedule": "mine:rate"})
    train = own.train.model_copy(update={"hooks": ["mine:Hook", "sparkring.training.hooks:Hook"]})
    assert references(own.model_copy(update={"optim": optim, "train": train})) == mine | others


def test_a_changed_line_changes_the_hash_of_its_file_alone(net: Path) -> None:
    recipe = config(factory=f"{NET}:Net")
    before = user_modules(recipe)
    assert {name: Path(module.file).name for name, module in before.items()} == {
        NET: f"{NET}.py", PARTS: f"{PARTS}.py"
    }  # fmt: skip
    (net / f"{PARTS}.py").write_text("class Net:\n    width = 5\n")
    after = user_modules(recipe)
    assert after[NET] == before[NET] and after[PARTS].sha256 != before[PARTS].sha256
    (net / f"{NET}.py").write_text("class Net(:\n")
    with pytest.raises(EtlError, match=rf"model.factory = '{NET}:Net': .*{NET}.py, line 1"):
        user_modules(recipe)


def test_a_manifests_content_is_not_when_it_was_written() -> None:
    made = manifest()
    assert content_digest(made.model_copy(update={"created_at": "later"})) == content_digest(made)
    assert content_digest(made.model_copy(update={"fingerprint": "9" * 64})) == content_digest(made)
    file = unread_file("train", 7, "a")
    one, other = (made.model_copy(update={"files": (file.model_copy(update=it),)}) for it in ({}, {"sha256": "9" * 64}))
    assert content_digest(one) != content_digest(other)
