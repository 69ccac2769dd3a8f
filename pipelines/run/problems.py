"""Everything that is wrong, by whose it is, and the one error that says it all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sparkring.conf.errors import ConfigError, problems_text
from sparkring.conf.secrets import redact
from sparkring.etl.errors import EtlError
from sparkring.training.launch.failure import LaunchError


@dataclass(frozen=True)
class Problems:
    """Lines, key first. `recipe`: exit code 2; `data`: its tables or dataset, 3; `resources`: Spark or storage, 5."""

    recipe: list[str] = field(default_factory=list)
    data: list[str] = field(default_factory=list)
    resources: list[str] = field(default_factory=list)

    def __add__(self, other: Problems) -> Problems:
        return Problems(self.recipe + other.recipe, self.data + other.data, self.resources + other.resources)

    def raise_any(self, where: str) -> None:
        """Raise one error with every problem, if there is one; its kind is that of the first of the three.

        ConfigError, EtlError or LaunchError.
        """
        lines = [redact(line) for line in dict.fromkeys([*self.recipe, *self.data, *self.resources])]
        if self.recipe:
            raise ConfigError(where, lines)
        if self.data:
            raise EtlError(problems_text(where, lines))
        if self.resources:
            raise LaunchError(problems_text(where, lines))


def refusals(*checks: Iterable[str]) -> list[str]:
    """List the lines of several checks, each once."""
    return list(dict.fromkeys(line for check in checks for line in check))
