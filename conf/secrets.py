"""Hide secrets in everything that is logged, stored, tracked or sent to ranks.

A recipe may hold secrets in `spark.conf` only, where they are kept apart (`SecretStr`). In a message they are known by
their form: user information in a URL, a value after a name such as `password`, the tokens of well-known services. They
are hidden up to the next blank or quote: rather too much than the second half of a password shown.
"""

from __future__ import annotations

import logging
import re
from typing import Any
from urllib.parse import unquote

HIDDEN = "**********"  # as pydantic shows a SecretStr

# Long words come in logs: nothing here begins with a repetition, and none is gone through twice (`++`).
_NAME = (
    r"(?:(?:secret|passw(?:or)?d|passphrase|credential|jaas[_.-]?config|sas[_.-]?token"
    r"|(?:access|account|api|auth|private|signing|encryption|storage|shared)[_.-]?key)[\w.-]{0,100}"
    r"|token(?:\.[\w.-]{1,100})?(?!\w)"
    r"|(?<![A-Za-z0-9])(?:sig|sas|pwd|auth)(?:\.[\w.-]{1,100})?(?!\w)"
    r"|(?<=[_.-])(?<!forward_)(?<!backward_)pass(?!\w)"
    r"|(?:signature|authorization|j?session[_-]?id|cookie|bearer|client[_.-]?assertion)(?!\w))"
)
_VALUE = (
    r"""(?:\\{1,8}["'][^"'\n]*+["']?|"(?:[^"\\\n]|\\.)*+"?|'(?:[^'\\\n]|\\.)*+'?|\[[^\]\n]*+\]?|\{[^}\n]*+\}?"""
    r"""|(?:(?:bearer|basic|digest|negotiate)\s+)?[^\s"'<>]++)"""
)
_NAMED = re.compile(rf"({_NAME}\\{{0,8}}[\"']?\s*[=:]\s*)(?!\*{{10}}){_VALUE}", re.IGNORECASE)
_IS_NAME = re.compile(rf"{_NAME}$", re.IGNORECASE)
_REST = r"[^\s\"'<>]++"
_FORMS = [
    (re.compile(pattern, re.IGNORECASE), rf"\g<1>{HIDDEN}\g<2>")
    for pattern in (
        # In abfs and wasb the name before the @ is a container; a colon there is a key. A port is not a password.
        r"(?<!abfs)(?<!abfss)(?<!wasb)(?<!wasbs)(://)(?:[^\s\"'<>/?#@]{0,512}+(@))++",
        r"(?<!/)(//)[^\s\"'<>/?#@\[:]{0,100}+:(?!\d{1,5}(?:[\s\"'/?#]|$))(?:[^\s\"'<>@]{0,512}+(@))++",
        r"(jdbc:oracle:\w{1,10}:)[^\s\"'@/]{1,100}+/(?:[^\s\"'<>@]{0,512}+(@))++",
        rf"([?&]key=){_REST}()",
        rf"(--[\w-]{{0,50}}(?:password|secret|token|api-key)\s+){_REST}()",
        rf"(?<![\w.])(bearer\s+){_REST}()",
        rf"((?:secret|passw(?:or)?d|passphrase)[\w.-]{{0,100}}\t+){_REST}()",
        r"(\bcookie:\s*)[^\n\"']++()",
        rf"(\bcurl\b[^\n]{{0,200}}?\s(?:-u|--user)[ =]?[\"']?)[^\s\"'<>:]++:(?!//){_REST}()",
        rf"(hooks\.slack\.com/\w{{1,20}}/){_REST}()",
    )
] + [
    (re.compile(pattern), HIDDEN)
    for pattern in (
        r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
        r"\b(?:gh[pousr]_|github_pat_|glpat-|xox[abprs]-|sk-)[\w-]{16,}+|\b(?:hf|npm)_[A-Za-z0-9]{16,}+",
        r"\bdapi[0-9a-f]{32}|\bAIza[\w-]{35}",
        r"\beyJ[\w-]{8,}+\.[\w-]++\.[\w-]*+",
        r"-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----[^-]*+(?:-----END [A-Z ]{0,20}PRIVATE KEY-----)?",
    )
]  # fmt: skip


def redact(text: str) -> str:
    """Replace secrets in the text by HIDDEN; a percent-encoding that hid one is removed."""
    decoded = unquote(text) if "%" in text else text
    hidden = _hidden(decoded)
    return text if hidden == decoded else hidden


def _hidden(text: str) -> str:
    for pattern, instead in _FORMS:
        text = pattern.sub(instead, text)
    return _NAMED.sub(rf"\g<1>{HIDDEN}", text)


# By path in a recipe: the user's names of tables and columns, SQL and prose. There a name tells nothing, and
# `token = 'abc'` is a condition: only a URL can hold a secret.
_FREE_TEXT = re.compile(r"(?:etl|description|report\.sample_prompt)(?:\.|$)")
_URL = re.compile(r"\S*(?:://|@)\S*")


def redacted(value: Any, path: str = "", numbers: bool = False) -> Any:
    """Redact every text in a JSON-able value, and hide all of it at and below the name of a secret.

    Args:
        value: the structure; never its JSON, which would not be JSON any more.
        path: keys above it, dots between, as in a recipe.
        numbers: hide numbers below such a name too.
    """
    free = _FREE_TEXT.match(path)
    tells = not free and is_secret_name(path)
    if isinstance(value, dict):
        known = bool(tells or free)  # so it is below
        return {k: redacted(v, path if known else f"{path}.{k}".lstrip("."), numbers) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item, path, numbers) for item in value]
    if tells and (isinstance(value, str) or (numbers and type(value) in (int, float))):
        return HIDDEN if value != "" else value
    if not isinstance(value, str):
        return value
    return _URL.sub(lambda word: redact(word[0]), value) if free else redact(value)


def is_secret_name(name: str) -> bool:
    """Whether what this key holds is a secret: `fs.s3a.secret.key`, `hf_token`; not `tokens`, `tls_key`."""
    return bool(_IS_NAME.search(name))


class RedactingFormatter(logging.Formatter):
    """Hides secrets in whole log records, tracebacks too."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))
