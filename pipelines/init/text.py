"""A project for text: a folder of files, a document each, and the built-in GPT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparkring.conf.load import ConfigError
from sparkring.conf.plain_text import count_of
from sparkring.conf.tasks import LANGUAGE_MODEL
from sparkring.pipelines.init.folder import Project, example_rows, python_use, run_name

FEWEST_FILES = 100  # below, a split by hash may have none
BYTES_FOR_BPE = 1 << 20  # less text than this is no use to a trained tokenizer
SEQUENCE = 129  # tokens: 128 inputs, each with the next one as its target
STEPS = 300


def text_project(data: str, folder: Path) -> Project:
    """Inspect a folder of text files and choose a recipe. ConfigError where there are too few."""
    path = Path(data).resolve()
    if not path.is_dir():
        raise ConfigError(data, ["--data: no such folder; text is a folder of files, a document each"])
    files = [file for file in path.rglob("*") if file.is_file() and not file.name.startswith((".", "_"))]
    if len(files) < FEWEST_FILES:
        problem = (
            f"--data: has {count_of(len(files), 'file')}; at least {FEWEST_FILES} are needed to train, validate and "
            "test"
        )
        raise ConfigError(data, [problem])
    sizes = [file.stat().st_size for file in files]
    if unreadable := next((file for file in files[:FEWEST_FILES] if not _is_utf8(file)), None):
        raise ConfigError(data, [f"{unreadable}: is not UTF-8 text; take it out, or convert it"])
    name = run_name(folder.resolve().name)
    recipe, tokens = text_recipe(path, sum(sizes), name)
    return Project(
        recipe,
        [
            f"{count_of(len(files), 'file', ',')}, {sum(sizes) / 1e6:.1f} MB of text; a file is a document",
            f"tokens: {tokens}",
            "documents are split at random by their paths: 80 % train, 10 % valid, 10 % test",
            f"a GPT of 4 layers, width 128, trained for {STEPS} steps",
        ],
        ["copies of a document in two splits make scores too good; remove them"],
        limit_rows=len(files),
        use=_use(name),
    )


def _use(name: str) -> str:
    prompt = example_rows({"prompt": "The ", "tokens": 50, "temperature": 0.8})
    return f"The trained model is `models:/{name}@champion`. It writes on after a prompt:\n\n{python_use(name, prompt)}"


def text_recipe(path: Path, size: int, name: str) -> tuple[dict[str, Any], str]:
    """Make the recipe for so many bytes of text; also describe its tokens."""
    bpe = size >= BYTES_FOR_BPE
    tokens = {"tokenizer": "bpe", "vocab_size": 2048} if bpe else {"tokenizer": "bytes"}
    check = {"name": "empty", "kind": "expression", "sql": "length(text) > 0", "level": "row"}
    recipe = {
        "name": name,
        "etl": {
            "kind": "text",
            "sources": {"documents": {"path": str(path), "format": "text"}},
            "rows": "documents",
            "key": ["path"],
            "checks": [check],
            "split": {"kind": "hash", "shares": {"train": 0.8, "valid": 0.1, "test": 0.1}},
            "text": {**tokens, "seq_len": SEQUENCE},
        },
        "model": {
            "factory": "sparkring.training.models.gpt:GPT",
            "task": LANGUAGE_MODEL.name,
            "args": {"width": 128, "layers": 4, "heads": 4},
        },
        "optim": {"lr": 0.003, "weight_decay": 0.1, "warmup_steps": 20, "final_lr_share": 0.1},
        "train": {"epochs": None, "steps": STEPS, "global_batch": text_batch(size)},
        "report": {"sample_prompt": "The ", "sample_tokens": 100},
    }
    return recipe, "byte pairs, 2,048 of them, learned from the text" if bpe else "bytes: too little text for others"


def text_batch(size: int) -> int:
    """Choose the rows per step, so that even text of one byte a token fills several steps."""
    batch = 32
    while batch > 2 and batch * 8 * SEQUENCE * 4 > size:
        batch //= 2
    return batch


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True
