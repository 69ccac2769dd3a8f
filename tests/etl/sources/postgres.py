"""A PostgreSQL server of a test's own: in a temporary folder, on a free port of this machine, killed at the end."""

from __future__ import annotations

import glob
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.ports import unused_port

USER, PASSWORD = "lake_reader", "t0p-secret/word"
JARS = (
    os.environ.get("POSTGRESQL_JAR", ""),
    "/usr/share/java/postgresql.jar",
    str(Path.home() / ".m2/repository/org/postgresql/postgresql/*/*.jar"),
)


def driver_jar() -> str | None:
    """PostgreSQL's JDBC driver, as Debian or Maven has put it on this machine."""
    found = [jar for pattern in JARS for jar in sorted(glob.glob(pattern))]
    return found[0] if found else None


def binary(name: str) -> str | None:
    versions = sorted(glob.glob(f"/usr/lib/postgresql/*/bin/{name}"), key=lambda path: int(path.split("/")[4]))
    return versions[-1] if versions else shutil.which(name)


class PostgresServer:
    """`start`, `stop` and `kill` as often as wanted: the data stay."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        # The server refuses to run as root.
        names = {user.pw_name for user in pwd.getpwall()}
        self.user = None if os.getuid() else ("postgres" if "postgres" in names else "nobody")
        self.process: subprocess.Popen[bytes] | None = None
        self.port = unused_port()
        if self.user is not None:
            shutil.chown(folder, self.user)
        secret = folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        words = ["-A", "scram-sha-256", "-U", USER, f"--pwfile={secret}", "--no-sync", "-E", "UTF8", "--locale=C"]
        done = self._popen([str(binary("initdb")), "-D", str(self.data), *words])
        assert done.wait(300) == 0
        self.start()

    def _popen(self, command: list[str]) -> subprocess.Popen[bytes]:
        groups = None if self.user is None else []
        return subprocess.Popen(
            command, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, user=self.user, extra_groups=groups
        )

    @property
    def url(self) -> str:
        return f"jdbc:postgresql://127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"}
        settings |= {"autovacuum": "off", "max_connections": "50", "TimeZone": "Asia/Kolkata"}
        words = [f"-c{name}={value}" for name, value in settings.items()]
        self.process = self._popen([str(binary("postgres")), "-D", str(self.data), f"-p{self.port}", *words])
        deadline = time.monotonic() + 60
        while self.psql("SELECT 1", check=False).returncode and time.monotonic() < deadline:
            time.sleep(0.1)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(300)
            self.process = None

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def client(self, *words: str) -> tuple[list[str], dict[str, str]]:
        """A psql command line and its environment."""
        command = [str(binary("psql")), "-h127.0.0.1", f"-p{self.port}", "-U", USER, "-qAtX", "-v", "ON_ERROR_STOP=1"]
        return [*command, *words, "postgres"], os.environ | {"PGPASSWORD": PASSWORD}

    def psql(self, sql: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command, environment = self.client("-c", sql)
        return subprocess.run(command, env=environment, check=check, capture_output=True, text=True, timeout=600)

    def sql(self, sql: str) -> str:
        return self.psql(sql).stdout.strip()

    def table(self, name: str, query: str) -> None:
        """Make the table anew of the query's rows."""
        self.sql(f"DROP TABLE IF EXISTS {name}; CREATE TABLE {name} AS {query}")

    def copy(self, table: str, lines: str) -> None:
        """Load a table from lines of COPY's text format."""
        command, environment = self.client("-c", f"COPY {table} FROM STDIN")
        subprocess.run(command, env=environment, input=lines, check=True, text=True, timeout=600)


def missing() -> str:
    """What this machine lacks for a server; "" for nothing."""
    if binary("initdb") is None or binary("psql") is None:
        return "no PostgreSQL server is installed (apt-get install postgresql)"
    if driver_jar() is None:
        return "PostgreSQL's driver for Java is not installed (apt-get install libpostgresql-jdbc-java)"
    return ""


@contextmanager
def running() -> Iterator[PostgresServer]:
    """A server for the block; skips the test where there is no PostgreSQL, or no driver of it for Java."""
    if missing():
        pytest.skip(missing())
    # Not below pytest's folders, which the server's user may not enter.
    with tempfile.TemporaryDirectory(prefix="postgres-") as folder:
        Path(folder).chmod(0o755)
        server = PostgresServer(Path(folder))
        try:
            yield server
        finally:
            server.kill()
            time.sleep(0.2)  # its children end as they notice
