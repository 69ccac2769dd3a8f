"""What is shown of an exception; the one of a configuration that cannot be used."""

from __future__ import annotations

import re

from sparkring.conf.secrets import redact

RETRIED = re.compile(
    r"HTTPS?ConnectionPool\(host='(?P<host>[^']*)', port=(?P<port>\w+)\): "
    r"Max retries exceeded with url: \S+ \(Caused by (?P<cause>.*)\)"
)


def first_line(error: object) -> str:
    """Return the first line of an error's text, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return _without_retries(lines[0]) if lines else type(error).__name__


def error_line(error: object) -> str:
    """Return what a log or a message shows of an error: its first line, short, its credentials hidden."""
    return redact(first_line(error))[:500]


def _without_retries(line: str) -> str:
    """Leave of urllib3's line about retries the host and the cause, which it puts last, in classes of its own."""

    def host_and_cause(found: re.Match[str]) -> str:
        quoted = re.findall(r"""(?:'([^']*)'|"([^"]*)")[,)]""", re.sub(r"<[^>]*>", "", found["cause"]))
        causes = (re.sub(r"^HTTPS?Connection(?:Pool)?\(.*?\): ", "", single or double) for single, double in quoted)
        return f"{found['host']}:{found['port']}: {': '.join(causes)}" if quoted else found[0]

    return RETRIED.sub(host_and_cause, line)


class ConfigError(ValueError):
    """The configuration cannot be used; `problems` lists every reason, with secrets hidden."""

    def __init__(self, where: str, problems: list[str]):
        self.problems = problems = [redact(problem) for problem in problems]
        super().__init__(problems_text(where, problems))


def problems_text(where: str, problems: list[str]) -> str:
    """One message of every problem at a place."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return f"{where}: {count}\n" + "\n".join(f"  - {p}" for p in problems)
