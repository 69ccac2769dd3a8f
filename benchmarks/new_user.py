"""A new user's first hour, played by a script: five problems from `sparkring init` to `sparkring serve-check`.

    make users
    python benchmarks/new_user.py --only recommender --out /tmp/users.md

The script writes a file of data, gives the `init` command of docs/how-to/recipes.md, and then only commands that
`init` prints under `next:`, one after the other. For images it also writes a network of its own into `cnn.py`, for the
labels a recipe on top of the other. A command that ends with another exit code than 0, a printed report that is not
there, or a run without scores beside baselines is a wrong turn, and the script ends with 1. `serve-check` installs the
model, so pip needs an index or its cache.
"""

from __future__ import annotations

import argparse
import csv
import inspect
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
from machine import ROOT, measured_with, publish
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(ROOT))

from sparkring.etl.raw import unpack_flights
from sparkring.pipelines.init.folder import RECIPE

PACKAGES = ("torch", "pyspark", "mlflow-skinny", "pyarrow", "numpy")
NOT_PLAYED = "sparkring ui "  # a server: the pages have a test of their own
INTERACTIONS, CARRIERS, GLYPHS = 1_000_000, 12, 60  # rows; classes; images of each digit
OWN_CNN = '''"""A network of the user's own: one convolution of large patches, and two layers."""

import torch
from torch import nn


class Cnn(nn.Module):
    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, 24, 8, stride=4)
        self.mix = nn.Conv2d(24, 48, 3)
        self.head = nn.Linear(48, classes)

    def forward(self, photo: torch.Tensor) -> torch.Tensor:
        pixels = photo.permute(0, 3, 1, 2).float() / 255 - 0.5
        return self.head(torch.relu(self.mix(torch.relu(self.patches(pixels)))).amax(dim=(2, 3)))
'''
WEIGHTED = """extends: recipe.yaml   # as docs/how-to/recipes.md has it; the weight is no feature
etl: {weight: weight, features: {weight: null}}
"""


def write_regression(folder: Path) -> str:
    """Flights of January 2013 as the demo's package has them: `NA` for null, a timestamp, texts, numbers."""
    flights = unpack_flights(folder / "flights")
    (folder / "january.csv").write_bytes((flights / "flights/2013-01.csv").read_bytes())
    return "sparkring init table --data january.csv --label air_time"


def write_classes(folder: Path) -> str:
    """Flights of February of the twelve airlines that have most; some have no time of departure."""
    flights = unpack_flights(folder / "flights")
    with (flights / "flights/2013-02.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    place = header.index("carrier")
    common = {name for name, _ in Counter(row[place] for row in rows).most_common(CARRIERS)}
    with (folder / "airlines.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *(row for row in rows if row[place] in common)])
    return "sparkring init table --data airlines.csv --label carrier"


def write_images(folder: Path) -> str:
    """Digits in matplotlib's typefaces, turned, moved and noisy: PNG files in a folder per digit. Seeded."""
    import matplotlib

    draw = np.random.default_rng(0)
    faces = sorted((Path(matplotlib.get_data_path()) / "fonts/ttf").glob("DejaVu*.ttf"))
    for digit in range(10):
        (folder / f"digits/{digit}").mkdir(parents=True)
        for number in range(GLYPHS):
            image = Image.new("L", (32, 32))
            font = ImageFont.truetype(str(faces[number % len(faces)]), int(draw.integers(18, 27)))
            at = tuple(draw.integers(3, 9, 2))
            ImageDraw.Draw(image).text((float(at[0]), float(at[1]) - 4), str(digit), fill=255, font=font)
            turned = np.asarray(image.rotate(float(draw.uniform(-15, 15)))).astype(np.int64)
            noisy = np.clip(turned + draw.integers(-40, 41, turned.shape), 0, 255).astype(np.uint8)
            Image.fromarray(noisy).save(folder / f"digits/{digit}/{number}.png")
    return "sparkring init images --data digits"


def write_labels(folder: Path) -> str:
    """Python's standard library: what a module imports, by what its text is like; long modules count for more."""
    names = ("os", "re", "sys")
    with (folder / "modules.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["lines", "functions", "classes", "slashes", "comments", "package", "weight", *names])
        library = Path(sysconfig.get_paths()["stdlib"])
        for path in sorted(library.rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            if not text or "site-packages" in path.parts:
                continue
            words = ("\n", "def ", "class ", "/", "#")
            labels = [int(re.search(rf"^\s*import .*\b{name}\b", text, re.M) is not None) for name in names]
            package = path.relative_to(library).parts[0] if path.parent != library else ""
            rows.writerow([*(text.count(word) for word in words), package, 1 + text.count("\n") // 100, *labels])
    return "sparkring init table --data modules.csv --label os,re,sys"


def write_interactions(folder: Path) -> str:
    """A million interactions of 20,000 users and 5,000 films, drawn by taste and popularity. Seeded.

    Each user has two of 25 tastes, each film one; three of four choices are of a taste of the user's, by popularity.
    """
    draw = np.random.default_rng(0)
    users, films, tastes = 20_000, 5_000, 25
    weight, taste = draw.pareto(1.2, films) + 0.1, draw.integers(0, tastes, films)
    who = draw.choice(users, INTERACTIONS, p=(p := draw.pareto(2.0, users) + 0.2) / p.sum())
    wanted = draw.integers(0, tastes, (users, 2))[who, draw.integers(0, 2, INTERACTIONS)]
    what = draw.choice(films, INTERACTIONS, p=weight / weight.sum())
    for one in range(tastes):
        mine = np.flatnonzero((wanted == one) & (draw.random(INTERACTIONS) < 0.75))
        of = np.flatnonzero(taste == one)
        what[mine] = draw.choice(of, len(mine), p=weight[of] / weight[of].sum())
    when = np.datetime64("2024-01-01T00:00:00") + np.sort(draw.integers(0, 300 * 86_400, INTERACTIONS)).astype("m8[s]")
    table = {"user": who, "film": [f"film {n}" for n in what], "at": when, "year": 1960 + what % 60}
    pacsv.write_csv(pa.table(table), folder / "seen.csv")
    return "sparkring init recommender --data seen.csv --user user --item film --time at"


@dataclass(frozen=True)
class Problem:
    """`write` makes the files in a folder, and returns the first command.

    `own`: text of files that the user writes or changes; `recipe`: the one that is run, where it is the user's own.
    """

    title: str
    write: Callable[[Path], str]
    own: dict[str, str] = field(default_factory=dict)
    recipe: str = RECIPE


PROBLEMS = {
    "regression": Problem("Regression from CSV: minutes in the air, real flights", write_regression),
    "classes": Problem("Twelve classes that are texts, features with nulls: airlines, real flights", write_classes),
    "images": Problem("PNG images and a network of one's own: digits, drawn", write_images, {"cnn.py": OWN_CNN}),
    "labels": Problem(
        "Several labels, weighted: imports of Python's own modules",
        write_labels,
        {"weighted.yaml": WEIGHTED},
        "weighted.yaml",
    ),
    "recommender": Problem("A recommender of a million interactions: films, drawn", write_interactions),
}


@dataclass
class User:
    """A shell that remembers its folder and its variables from line to line, as a terminal does."""

    folder: Path
    environment: dict[str, str]

    def does(self, line: str, log: Path) -> tuple[int, float, str]:
        """Run one line: exit code, seconds, output."""
        began, state = time.monotonic(), log.with_suffix(".env")
        script = f"{line}\ncode=$?\n(pwd; env -0) > {shlex.quote(str(state))}\nexit $code"
        with log.open("w") as out:
            done = subprocess.run(["bash", "-c", script], cwd=self.folder, env=self.environment, stdout=out, stderr=out)
        cwd, _, variables = state.read_text().partition("\n")
        self.folder = Path(cwd)
        self.environment = dict(item.split("=", 1) for item in variables.split("\0") if "=" in item)
        return done.returncode, time.monotonic() - began, log.read_text()


def new_user(home: Path) -> User:
    """A user of this checkout in an empty folder: `sparkring` is on the PATH, and nothing of ours on Python's."""
    scripts, work = home / "bin", home / "work"
    scripts.mkdir(parents=True)
    work.mkdir()
    program = f'PYTHONPATH="{ROOT}:$PYTHONPATH" exec {sys.executable} -m sparkring.pipelines.cli "$@"'
    (scripts / "sparkring").write_text(f"#!/bin/sh\n{program}\n")
    (scripts / "sparkring").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OLDPWD")}
    return User(work, kept | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"})


def next_lines(output: str) -> list[str]:
    """The commands that `init` prints under `next:`, without their comments."""
    lines = re.split(r"^next:$", output, flags=re.M)[-1].splitlines()
    return [line.partition("   #")[0].strip() for line in lines if line.startswith("  ")]


def wrong_turn(line: str, code: int, output: str) -> str:
    """What is wrong after a command; empty if nothing is."""
    if code:
        last = next((text for text in reversed(output.splitlines()) if text.strip()), "")
        return f"exit code {code}: {last[:300]}"
    if line.startswith("sparkring run "):
        report = re.search(r"^ *report +(\S+)$", output, re.M)
        if report is None or not Path(report[1]).exists():
            return "the report that it names is not there"
        if len(scores(output)) < 3:
            return "no scores beside a baseline"
    return ""


def scores(output: str) -> list[str]:
    """The table that a run ends with: its title, the model, the baselines."""
    found = re.search(r"^  \w+ split .*\n(?:  \S.*\n)+", output, re.M)
    return found[0].splitlines() if found else []


def own_files(problem: Problem) -> list[str]:
    """What the user writes, as blocks of Markdown."""
    kinds = {".py": "python", ".yaml": "yaml"}
    return [f"```{kinds[Path(name).suffix]} {name}\n{text}```\n" for name, text in problem.own.items()]


def play(name: str, problem: Problem, home: Path) -> tuple[list[str], str]:
    """Solve one problem; Markdown of what was done, and the first wrong turn, empty if there was none."""
    user, rows, shown, began = new_user(home), [], [], time.monotonic()
    lines, wrong, number = [problem.write(user.folder)], "", 0
    while lines and not wrong:
        line, number = lines.pop(0), number + 1
        if line.startswith(NOT_PLAYED):
            continue
        code, seconds, output = user.does(line, home / f"{number}.log")
        if line.startswith("sparkring init "):
            lines = [line.replace(RECIPE, problem.recipe) for line in next_lines(output)]
            wrong = "" if lines else "nothing stands under `next:`"
        elif line.startswith("cd "):
            for file, text in problem.own.items():
                (user.folder / file).write_text(text)
        wrong = wrong_turn(line, code, output) or wrong
        shown = scores(output) or shown
        rows.append(f"| `{line}` | {code} | {seconds:.0f} |")
        print(f"{name}: {line}: {code}, {seconds:.0f} s {wrong}", flush=True)
    about = [f"## {problem.title}", "", inspect.getdoc(problem.write) or "", "", *own_files(problem)]
    table = ["| command | exit code | s |", "|---|---|---|", *rows, ""]
    ended = (
        f"**Wrong turn:** {wrong}" if wrong else f"{time.monotonic() - began:.0f} s from the data to the last command."
    )
    return [*about, *table, ended, "", "```text", *shown, "```", ""], wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PROBLEMS, nargs="+", help="some of the problems; default: all")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result there too")
    arguments = parser.parse_args()
    chosen = {name: PROBLEMS[name] for name in arguments.only or PROBLEMS}
    text, wrong = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name, problem in chosen.items():
            lines, turn = play(name, problem, Path(folder) / name)
            text += lines
            wrong |= {name: turn} if turn else {}
    said = f"{len(chosen) - len(wrong)} of {len(chosen)} problems without a wrong turn, and without a look at the code"
    head = ["# A new user's first hour", "", measured_with(*PACKAGES) + ".", "", f"{said}.", ""]
    publish("\n".join([*head, *text]), arguments.out)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
