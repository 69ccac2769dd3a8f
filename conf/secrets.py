"""Hide secrets in everything that is logged, stored, tracked or sent to ranks.

A recipe may hold secrets in `spark.conf` only, where they are kept apart (`SecretStr`). In a message they are known by
their form: user information in a URL, a value after a name such as `password`, the tokens of well-known services. They
are hidden up to the next blank or quote: rather too much than the second half of a password shown.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote, unquote_plus

from sparkring.conf.plain_text import for_terminal

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
    r"""(?:\\{1,8}["'][^"'\n]*+["']?|"(?:[^"\\\n]|\\.|"")*+"?|'(?:[^'\\\n]|\\.|'')*+'?|\[[^\]\n]*+\]?|\{(?:[^}\n]|\}\})*+\}?"""
    r"""|(?:(?:bearer|basic|digest|negotiate)\s+)?[^\s"'<>]++)"""
)
_SENTENCE = r"(?:is|are|was|has|must|cannot|needs|the\ value)\ (?:is|not|no|be|a|an|one|in|of|unknown)\b"  # of ours
_NAMED = re.compile(rf"({_NAME}\\{{0,8}}[\"']?\s*(?:=|:(?! {_SENTENCE}))\s*)(?!\*{{10}}){_VALUE}", re.IGNORECASE)
_IS_NAME = re.compile(rf"{_NAME}$", re.IGNORECASE)
_REST = r"[^\s\"'<>]++"
_SERVICES = (  # whose URLs are the key to them; what follows is hidden
    r"hooks\.slack(?:-gov)?\.com/\w{1,20}/|discord(?:app)?\.com/api/(?:v\d+/)?webhooks/|api\.telegram\.org/(?:file/)?bot"
    r"|\.webhook\.office\.com/\w{1,20}/|outlook\.office(?:365)?\.com/webhook/|hc-ping\.com/|healthchecks\.io/ping/"
    r"|nosnch\.in/|cronitor\.link/(?:p/)?|ntfy\.sh/|hooks\.zapier\.com/hooks/|\bhook\.(?:\w+\.)?make\.com/"
    r"|maker\.ifttt\.com/trigger/[^\s/]{1,100}/(?:json/)?with/key/|events\.pagerduty\.com/integration/"
    r"|webexapis\.com/v1/webhooks/incoming/|open\.(?:feishu\.cn|larksuite\.com)/open-apis/bot/v2/hook/"
    r"|\b(?:uptime\.betterstack|(?:uptime\.)?betteruptime)\.com/api/v1/heartbeat/|/api/push/|\bwebhook\.site/"
    r"|alert\.victorops\.com/integrations/\w{1,20}/\w{1,20}/alert/|api\.flock\.com/hooks/sendMessage/"
)
_FORMS = [
    (re.compile(pattern, re.IGNORECASE), rf"\g<1>{HIDDEN}\g<2>")
    for pattern in (
        # In abfs and wasb the name before the @ is a container; a colon there is a key. A port is not a password.
        r"(?<!abfs)(?<!abfss)(?<!wasb)(?<!wasbs)(://)(?:[^\s\"'<>/?#@]{0,512}+(@))++",
        r"(?<!/)(//)[^\s\"'<>/?#@\[:]{0,100}+:(?!\d{1,5}(?:[\s\"'/?#]|$))(?:[^\s\"'<>@]{0,512}+(@))++",
        r"(jdbc:oracle:\w{1,10}:)(?:\"[^\"\n]*+\"|[^\s\"'@/]{1,100}+)+/(?:(?:\"[^\"\n]*+\"|[^\s\"'<>@]{0,512}+)(@))++",
        rf"([?&]key=){_REST}()",
        rf"(--[\w-]{{0,50}}(?:password|secret|token|api-key)\s+){_REST}()",
        rf"(?<![\w.])(bearer\s+){_REST}()",
        rf"((?:secret|passw(?:or)?d|passphrase)[\w.-]{{0,100}}\t+){_REST}()",
        r"(\bcookie:\s*)[^\n\"']++()",
        rf"(\bcurl\b[^\n]{{0,200}}?\s(?:-u|--user)[ =]?[\"']?)[^\s\"'<>:]++:(?!//){_REST}()",
        rf"({_SERVICES}){_REST}()",
    )
] + [
    (re.compile(pattern), HIDDEN)
    for pattern in (
        r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
        r"\b(?:gh[pousr]_|github_pat_|glpat-|xox[abprs]-|sk-)[\w-]{16,}+|\b(?:hf|npm)_[A-Za-z0-9]{16,}+",
        r"\bdapi[0-9a-f]{32}|\bAIza[\w-]{35}|\b\d{8,10}:[\w-]{35}\b",
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


_RANDOM = re.compile(r"(?=[a-z]*\d)(?=\d*[a-z])[a-z\d]{16,}|[\da-f]{8}(?:-[\da-f]{4}){3}-[\da-f]{12}", re.IGNORECASE)


def is_secret_url(url: str) -> bool:
    """Return whether a URL contains a secret, or a long random word that identifies the caller."""
    return redact(url) != url or bool(_RANDOM.search(unquote(url)))


_OF_LOGIN = re.compile(r"user|uid|login|pass|pwd|secret|token|key|cred|auth|wallet|jaas|sas|pin", re.IGNORECASE)
_PARAMETER = re.compile(r"(?:^|[?&;,(:/])\s*([\w.%-][\w.% -]*?)\s*=\s*")
_QUOTED = re.compile(r""""(?:[^"]|"")*+"|'(?:[^']|'')*+'|\{(?:[^}]|\}\})*+\}""")
_ENDS = ("&", ";", "[&;]", r"[&;,]", r"[&;,)]", r"\)+$")  # of a value, by the driver


def url_secrets(url: str) -> set[str]:
    """Return every spelling of the parts of a secret URL to redact: the URL, its host, its credentials.

    JDBC URLs included: `;Password={a;b}`, `(user=u,password=p)`, `user/"password"@host`.
    """
    servers = re.findall(r"//([^/?;]+)", url)
    logins = [name for server in re.findall(r"//([^?;]*)@", url) for name in re.split(r"[:@,]", server)]
    logins += [server.rpartition("@")[0].partition(":")[2] for server in re.findall(r"//(\S*@)", url)]
    if oracle := re.match(r"jdbc:oracle:\w+:(.*)@", url):
        logins += [oracle[1], *oracle[1].split("/", 1)]
    rests = [url[found.end() :] for found in _PARAMETER.finditer(url) if _OF_LOGIN.search(unquote(found[1]))]
    values = [quoted[0] for rest in rests if (quoted := _QUOTED.match(rest))]
    values += [re.split(end, rest, maxsplit=1)[0] for rest in rests if not _QUOTED.match(rest) for end in _ENDS]
    return {form for part in [url, *servers, *logins, *values] for form in _spellings(part) if form}


def _spellings(value: str) -> set[str]:
    """Return a value as it is, without its quotes, and without percent-encoding."""
    value = value.strip()
    bare = value
    if len(value) > 1 and value[0] + value[-1] in ('""', "''", "{}"):
        bare = value[1:-1].replace(value[-1] * 2, value[-1])
    return {value, bare, unquote(value), unquote(bare), unquote_plus(bare)}


def hide_values(text: str, names: Mapping[str, str]) -> str:
    """Replace known secrets, in every spelling, by `$NAME`. names: secret -> the variable that holds it."""
    spelled = {
        form.lower(): name
        for secret, name in names.items()
        for form in (secret, repr(secret)[1:-1], quote(secret, safe=""), quote(secret))
    }
    forms = [
        (r"(?<!\w)" if form[0].isalnum() else "") + re.escape(form) + (r"(?!\w)" if form[-1].isalnum() else "")
        for form in sorted(filter(None, spelled), key=len, reverse=True)
    ]
    known = re.compile("|".join(forms) or "(?!)", re.IGNORECASE)
    return known.sub(lambda found: f"${spelled[found[0].lower()]}", text)


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
    """Return whether a key's name marks a secret: `fs.s3a.secret.key`, `hf_token`; not `tokens`, `tls_key`."""
    return bool(_IS_NAME.search(name))


class RedactingFormatter(logging.Formatter):
    """Hides secrets in whole log records, tracebacks too, and what a terminal would obey."""

    def format(self, record: logging.LogRecord) -> str:
        return for_terminal(redact(super().format(record)))
