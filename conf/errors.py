"""What is shown of an exception; the one of a configuration that cannot be used."""

from __future__ import annotations

from sparkring.conf.secrets import redact


def first_line(error: object) -> str:
    """Return the first line of an error's text, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class ConfigError(ValueError):
    """The configuration cannot be used; `problems` lists every reason, with secrets hidden."""

    def __init__(self, where: str, problems: list[str]):
        self.problems = problems = [redact(problem) for problem in problems]
        super().__init__(problems_text(where, problems))


def problems_text(where: str, problems: list[str]) -> str:
    """One message of every problem at a place."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return f"{where}: {count}\n" + "\n".join(f"  - {p}" for p in problems)
