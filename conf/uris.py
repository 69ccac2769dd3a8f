"""What a storage URI and a stored path may be; opens nothing, so a recipe is checked without pyarrow."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlsplit

from sparkring.conf.secrets import redact

ARROW_SCHEMES = {"", "file", "s3", "s3a", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss"}
NO_SECRETS = (
    "which would be logged, tracked and sent to all ranks; give it by the environment "
    "(see docs/explanation/security.md)"
)
_HAS_SCHEME = re.compile(r"[A-Za-z][\w+.-]*(?:://|::)")
S3_OPTIONS = {"endpoint_override", "scheme", "region", "request_timeout", "connect_timeout"}


def local_path(uri: str) -> str | None:
    """Return the path on this machine that a URI or path means; None for a URI of another place.

    A local path is no URL: `?`, `#`, `%25` or `:` in it are letters of a folder's name.
    """
    if uri.startswith("file:"):
        rest = uri.removeprefix("file:")
        return f"/{rest[2:].partition('/')[2]}" if rest.startswith("//") else rest
    return None if _HAS_SCHEME.match(uri) else uri


def without_options(uri: str) -> str:
    """Return a storage URI without the options behind its `?`; a local path as it is."""
    return uri if local_path(uri) is not None else uri.partition("?")[0]


def check_uri(uri: str) -> None:
    """Check a storage URI without opening it.

    Raises ValueError for credentials in it, a scheme that neither pyarrow nor fsspec knows, and unknown options.
    """
    if redact(uri) != uri:
        raise ValueError(f"{redact(uri)} holds a secret, {NO_SECRETS}")
    if local_path(uri) is not None:
        return
    parts = urlsplit(uri)
    if parts.scheme in ("s3", "s3a") and (unknown := dict(parse_qsl(parts.query)).keys() - S3_OPTIONS):
        raise ValueError(f"{uri}: unknown option {sorted(unknown)} of s3; known: {sorted(S3_OPTIONS)}")
    if not parts.scheme:  # urlsplit takes no `_`
        raise ValueError(f"{uri}: no filesystem for scheme {uri.partition('://')[0]!r} in pyarrow or fsspec")
    if parts.scheme not in ARROW_SCHEMES:
        import fsspec

        if "::" in uri:
            raise ValueError(f"{uri}: `::` chains file systems, of which one may be any server; give the plain URI")
        if parts.scheme not in fsspec.available_protocols():
            raise ValueError(f"{uri}: no filesystem for scheme {parts.scheme!r} in pyarrow or fsspec")


def check_below(path: str) -> str:
    """Return the path; ValueError if it is absolute or may leave its folder."""
    if path.startswith("/") or "\0" in path or (".." in path and ".." in path.split("/")):
        raise ValueError(f"{path!r} must stay below its folder: no leading `/`, no `..`")
    return path
