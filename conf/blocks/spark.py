"""The recipe's `spark` block: the Spark session."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, field_validator

from sparkring.conf.schema import Strict
from sparkring.conf.secrets import is_secret_name, redact

SPARK_REDACTS = "(?i)secret|password|token|access[.]?key"  # Spark's default of spark.redaction.regex


def _plain(value: str | SecretStr) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else value


def _as_spark_writes(value: Any) -> Any:
    """Make a text of a number or a bool of YAML's."""
    return str(value).lower() if isinstance(value, int | float) else value


class SparkConfig(Strict):
    """The Spark session, where the job makes it itself; under spark-submit the submitted settings win."""

    master: str | None = Field(None, description="None: what spark-submit says, else local[<launch.world>]")
    app_name: str | None = Field(None, description="None: sparkring-<name>")
    log: Literal["file", "console"] = Field(
        "file",
        description="where Spark's log goes, where the job starts Spark itself: to a file, or to stderr",
    )
    conf: dict[str, Annotated[str | SecretStr, BeforeValidator(_as_spark_writes)]] = Field(
        {},
        description="settings of Spark; those it redacts itself (spark.redaction.regex), and others that hold secrets, "
        "reach the session and nothing else",
    )

    @field_validator("conf")
    @classmethod
    def _hide(cls, conf: dict[str, str | SecretStr]) -> dict[str, str | SecretStr]:
        rule = _plain(conf.get("spark.redaction.regex", SPARK_REDACTS))
        try:
            hides = re.compile(rule)
        except re.error as error:
            raise ValueError(f"spark.redaction.regex is no regular expression: {error}") from None

        def is_secret(key: str, value: str) -> bool:
            spark_hides = hides.search(key) or hides.search(value)
            return bool(spark_hides) or is_secret_name(key) or redact(value) != value

        return {
            key: SecretStr(_plain(value))
            if key != "spark.redaction.regex" and is_secret(key, _plain(value))
            else _plain(value)
            for key, value in conf.items()
        }

    def settings(self) -> dict[str, str]:
        """Return `conf` with its secrets, for the Spark session alone."""
        return {key: _plain(value) for key, value in self.conf.items()}
