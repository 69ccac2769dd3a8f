"""petastorm's own tests through `training/data/petastorm_adapter`: every test that does not pass, with its reason.

The library is the installed wheel's code (checked file by file); the tests are those of its tag, as the wheel lacks
some. They need TensorFlow, OpenCV and others, which are installed into an environment of their own on top of this one.
The adapter is imported in pytest's process only; that it reaches Spark's workers and process pools is part of the test.
Names that libraries dropped are replaced in the tests' own code (`EDITS`). What fails is run once more, alone, as
petastorm gives its process pool 20 s to start, too little on a loaded machine. Exits with 1 where a failure has no
known reason.

    git clone --branch v0.12.1 https://github.com/uber/petastorm build/petastorm
    python benchmarks/petastorm_suite.py build/petastorm --env build/petastorm-env --write FILE
"""

from __future__ import annotations

import argparse
import filecmp
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

from machine import measured_with, publish

ROOT = Path(__file__).resolve().parent.parent
VERSION = "0.12.1"
PACKAGES = [
    "opencv-python-headless",
    "pytz",
    "s3fs",
    "gcsfs",
    "tensorflow-cpu",
    "mock",
    "pytest-timeout",
    "pytest-logger",
]
EDITS = {"inspect.getargspec": "inspect.getfullargspec", "pandas.util.testing": "pandas.testing"}
# (what the test's name and message match, why): none of them is the adapter's
REASONS = [
    (
        r"no attribute '(chmod|chown|df|get_capacity|get_space_used)'",
        "pyarrow's HDFS client no longer has this call; petastorm itself makes none of it",
    ),
    (
        r"Logical ops .* dtype-less sequences",
        "the test's own predicate combines a pandas Series with a list, which pandas 3 refuses",
    ),
    (
        r"exceptions must be derived from Warning, not <class 'NoneType'>",
        "the test calls pytest.warns(None), gone in pytest 8",
    ),
    (
        r"test_torch_tensorable_types\[uint",
        "torch has unsigned types since; petastorm widens them as ever, and the test expects it not to",
    ),
    (r"No module named 'torchvision'", "needs torchvision"),
    (r"::test_atexit ", "starts a Python of its own, which does not import the adapter"),
    (
        r"::test_get_spark_session_safe_check (?s:.)*should not be invoked from executor side",
        "PySpark 4 raises an error of its own where the test expects Py4J's; petastorm's words are in it",
    ),
    (
        r"::test_workers_die_when_main_process_dies ",
        "the worker ends, but is left to this machine's init, which took 2.3 s to reap it where the test gives 2",
    ),
    (r"(?s)zmq\.Again|Timeout \(20 \[sec\]\)", "petastorm's 20 s for starting its process pool, on a loaded machine"),
]


def environment(folder: Path) -> Path:
    """Python of an environment with this one's packages, at their versions, and the tests' below `folder`."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
        (own / "sparkring.pth").write_text(sysconfig.get_path("purelib") + "\n")
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in installed.items()))
    subprocess.run([python, "-m", "pip", "install", "--quiet", "-c", constraints, *PACKAGES], check=True)
    return python


def prepare(source: Path, work: Path) -> Path:
    """A copy of the checkout, its tests edited. ValueError where its library is not the installed one."""
    spec = importlib.util.find_spec("petastorm")
    if spec is None or spec.origin is None or importlib.metadata.version("petastorm") != VERSION:
        raise ValueError(f"petastorm {VERSION} is not installed")
    wheel = Path(spec.origin).parent
    for file in wheel.rglob("*.py"):
        if not filecmp.cmp(file, source / "petastorm" / file.relative_to(wheel), shallow=False):
            raise ValueError(f"{file.relative_to(wheel)} differs: {source} is not the checkout of v{VERSION}")
    copy = Path(shutil.copytree(source / "petastorm", work / "petastorm"))
    for file in copy.rglob("tests/*.py"):
        text = file.read_text()
        for old, new in EDITS.items():
            text = text.replace(old, new)
        file.write_text(text)
    return work


def run_tests(python: Path, work: Path, tests: list[str]) -> dict[str, tuple[str, str]]:
    """(passed, skipped, failed; message) by test id."""
    names = {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": str(python), "TMPDIR": str(work)}
    command = [
        str(python),
        "-m",
        "pytest",
        "-p",
        "sparkring.training.data.petastorm_adapter",
        "-q",
        "-W",
        "ignore",
        "--tb=short",
    ]
    options = ["-p", "no:cacheprovider", "--timeout=360", f"--junitxml={work / 'result.xml'}"]
    subprocess.run(
        [*command, *options, "--continue-on-collection-errors", *tests], cwd=work, env=os.environ | names, check=False
    )
    return outcomes((work / "result.xml").read_text())


def outcomes(xml: str) -> dict[str, tuple[str, str]]:
    """The same, of pytest's JUnit file. A module that cannot be imported is one failed test."""
    found = {}
    for case in ET.fromstring(xml).iter("testcase"):
        module, name = case.get("classname") or "", case.get("name") or ""
        if not module:
            module, name = name, ""
        parts = module.split(".")
        classes = [part for part in parts if part[0].isupper()]
        path = "/".join(parts[: len(parts) - len(classes)]) + ".py"
        bad = [part for kind in ("failure", "error", "skipped") for part in case.findall(kind)]
        kind = "passed" if not bad else "skipped" if bad[0].tag == "skipped" else "failed"
        message = f"{bad[0].get('message')}\n{bad[0].text}" if bad else ""
        found["::".join([path, *classes, *filter(None, [name])])] = kind, message
    return found


def reason(test: str, message: str) -> str | None:
    return next((why for pattern, why in REASONS if re.search(pattern, f"{test} {message}")), None)


def report(results: dict[str, tuple[str, str]], again: int, seconds: float) -> tuple[str, int]:
    """The result file's text, and how many failures have no known reason."""
    counts = Counter(kind for kind, _ in results.values())
    groups: dict[str, list[str]] = {}
    for test, (kind, message) in results.items():
        if kind != "passed":
            skipped = f"skipped by petastorm: {message.splitlines()[0]}" if kind == "skipped" else None
            first = next(iter(message.splitlines()), "")
            why = skipped or reason(test, message) or f"NO KNOWN REASON: {first[:200]}"
            groups.setdefault(why, []).append(test)
    lines = [
        f"# petastorm {VERSION}: its own tests through the adapter",
        "",
        f"{measured_with('pyarrow', 'numpy', 'pandas', 'pyspark', 'torch')}; {seconds / 60:.0f} minutes. Of "
        f"{len(results)} tests "
        f"{counts['passed']} pass ({again} of them only when run again, alone), {counts['failed']} fail, "
        f"{counts['skipped']} are skipped. Replaced in the tests' own code: "
        + ", ".join(f"`{old}` by `{new}`" for old, new in EDITS.items())
        + ".",
    ]
    for why, tests in sorted(groups.items(), key=lambda group: -len(group[1])):
        lines += ["", f"## {why}", "", *[f"- `{test}`" for test in tests]]
    return "\n".join(lines) + "\n", sum(len(tests) for why, tests in groups.items() if why.startswith("NO KNOWN"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help=f"a checkout of petastorm v{VERSION}")
    parser.add_argument("--env", type=Path, required=True, help="folder of the environment, made where it is missing")
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    python = environment(args.env.resolve())
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        work = prepare(args.source.resolve(), Path(folder))
        results = run_tests(python, work, ["petastorm"])
        failed = [test for test, (kind, _) in results.items() if kind == "failed"]
        second = run_tests(python, work, failed) if failed else {}
    text, unexplained = report(
        results | second, sum(kind == "passed" for kind, _ in second.values()), time.monotonic() - began
    )
    publish(text, args.write)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
