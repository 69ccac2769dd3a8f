"""What is shown of an exception and its traceback; the one of a configuration that cannot be used."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sparkring.conf.plain_text import count_of
from sparkring.conf.secrets import redact

RETRIED = re.compile(
    r"HTTPS?ConnectionPool\(host='(?P<host>[^']*)', port=(?P<port>\w+)\): "
    r"Max retries exceeded with url: \S+ \(Caused by (?P<cause>.*)\)"
)
_FRAME = re.compile(r'  File "([^"]+)", line \d+')
# Of a frame's file: an installed package, Python itself, or ours, in a checkout, a wheel or the zip that Spark ships.
_OURS = r"/sparkring/(conf|etl|training|pipelines)/"
_FRAMEWORK = re.compile(rf"/(site|dist)-packages/|/lib/python3|^<frozen|{_OURS}")


def first_line(error: object) -> str:
    """Return the first line of an error's text, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return _without_retries(lines[0]) if lines else type(error).__name__


def error_line(error: object) -> str:
    """Return what a log or a message shows of an error: its first line, short, its credentials hidden."""
    return redact(first_line(error))[:500]


def _without_retries(line: str) -> str:
    """Shorten urllib3's line about retries to the host and the cause, which it puts last, in its own classes."""

    def host_and_cause(found: re.Match[str]) -> str:
        quoted = re.findall(r"""(?:'([^']*)'|"([^"]*)")[,)]""", re.sub(r"<[^>]*>", "", found["cause"]))
        causes = (re.sub(r"^HTTPS?Connection(?:Pool)?\(.*?\): ", "", single or double) for single, double in quoted)
        return f"{found['host']}:{found['port']}: {': '.join(causes)}" if quoted else found[0]

    return RETRIED.sub(host_and_cause, line)


def fold_traceback(text: str) -> str:
    """Fold the frames of Python, installed packages and sparkring in a traceback, so that the user's stand out.

    The innermost frame stays, and says where the error arose. A traceback without a frame of the user's is left whole.
    """
    blocks = _blocks(text.splitlines())
    if not any(is_frame and not _is_framework(lines[0]) for is_frame, lines in blocks):
        return text
    shown: list[str] = []
    folded = 0
    for (is_frame, lines), (next_is_frame, _) in zip(blocks, [*blocks[1:], (False, [])], strict=True):
        if is_frame and next_is_frame and _is_framework(lines[0]):
            folded += 1
            continue
        if folded:
            shown.append(f"  [{count_of(folded, 'frame')} of Python, packages and sparkring]")
            folded = 0
        shown += [line for line in lines if not is_frame or line.strip("~^ ")]
    return "\n".join(shown)


def is_raised_here(text: str) -> bool:
    """Return whether sparkring's own code raised the error, with no user frame in the traceback."""
    frames = [lines[0] for is_frame, lines in _blocks(text.splitlines()) if is_frame]
    return bool(frames) and all(map(_is_framework, frames)) and re.search(_OURS, frames[-1]) is not None


def _blocks(lines: Sequence[str]) -> list[tuple[bool, list[str]]]:
    """Cut a traceback into its frames (True), each with the lines of its source, and other lines."""
    blocks: list[tuple[bool, list[str]]] = []
    for line in lines:
        if _FRAME.match(line):
            blocks.append((True, [line]))
        elif blocks and blocks[-1][0] and line.startswith("    "):
            blocks[-1][1].append(line)
        else:
            blocks.append((False, [line]))
    return blocks


def _is_framework(frame: str) -> bool:
    found = _FRAME.match(frame)
    return found is not None and bool(_FRAMEWORK.search(found[1]))


class ConfigError(ValueError):
    """The configuration cannot be used; `problems` lists every reason, with secrets hidden."""

    def __init__(self, where: str, problems: list[str]):
        self.problems = problems = [redact(problem) for problem in problems]
        super().__init__(problems_text(where, problems))


def problems_text(where: str, problems: list[str]) -> str:
    """Join all problems at a place into one message."""
    return f"{where}: {count_of(len(problems), 'problem')}\n" + "\n".join(f"  - {p}" for p in problems)
