"""A real standalone Spark cluster on one machine: master with driver, and three workers, each in a network namespace.

Needs root, `ip`, `tc` and `ss`. Every worker has its own address on a bridge, so links can be cut and slowed like
cables. The storage all hosts share is a small disk of its own, so that it can be filled.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pyspark

ROOT = Path(__file__).resolve().parents[2]
SPARK_HOME = Path(pyspark.__file__).parent
DISK_BYTES = 64 << 20


def possible() -> bool:
    """Whether this machine lets us make network namespaces."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "ss"))):
        return False
    name = f"srtry{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made


def sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Cluster:
    """Namespaces <prefix>0 (master and driver) and <prefix>1..n (workers with one core each)."""

    def __init__(
        self,
        folder: Path,
        workers: int = 3,
        prefix: str = "sr",
        subnet: str = "10.77.0",
        worker_timeout_s: int = 15,  # Spark's own: 60
    ):
        self.worker_timeout_s = worker_timeout_s
        self.folder, self.workers, self.prefix, self.subnet = folder, workers, f"{prefix}{os.getpid() % 10000}x", subnet
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.bridge = f"{self.prefix}b"
        self.disk = folder / "disk"

    @property
    def master_url(self) -> str:
        return f"spark://{self.address(0)}:7077"

    def address(self, node: int) -> str:
        return f"{self.subnet}.{10 + node}"

    def namespace(self, node: int) -> str:
        return f"{self.prefix}{node}"

    def start(self) -> None:
        self.disk.mkdir()  # mounted first: `ip netns exec` gives each process the mounts there are then
        sh("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "sparkring-chaos", str(self.disk))
        sh("ip", "link", "add", self.bridge, "type", "bridge")
        sh("ip", "link", "set", self.bridge, "up")
        for node in range(self.workers + 1):
            inside, outside = "eth0", f"{self.prefix}v{node}"
            sh("ip", "netns", "add", self.namespace(node))
            sh("ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", self.namespace(node))
            sh("ip", "link", "set", outside, "master", self.bridge, "up")
            self.inside(node, "ip", "addr", "add", f"{self.address(node)}/24", "dev", inside)
            self.inside(node, "ip", "link", "set", inside, "up")
            self.inside(node, "ip", "link", "set", "lo", "up")
        self._spawn("master", 0, "org.apache.spark.deploy.master.Master", "--host", self.address(0), "--port", "7077")
        self._await("master", "I have been elected leader")
        for node in range(1, self.workers + 1):
            self.start_worker(node)
        for node in range(1, self.workers + 1):
            self._await(f"worker{node}", "Successfully registered with master")

    def inside(self, node: int, *command: str) -> None:
        sh("ip", "netns", "exec", self.namespace(node), *command)

    def start_worker(self, node: int) -> None:
        options = ["--host", self.address(node), "--cores", "1", "--memory", "1g"]
        work = ["--work-dir", str(self.folder / f"work{node}"), self.master_url]
        self._spawn(f"worker{node}", node, "org.apache.spark.deploy.worker.Worker", *options, *work)

    def _spawn(self, name: str, node: int, *java: str) -> None:
        env = self.environment(node)
        command = ["ip", "netns", "exec", self.namespace(node), str(SPARK_HOME / "bin" / "spark-class"), *java]
        with open(self.folder / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def environment(self, node: int) -> dict[str, str]:
        own = {"SPARK_HOME": str(SPARK_HOME), "SPARK_LOCAL_IP": self.address(node), "PYSPARK_PYTHON": sys.executable}
        own |= {"SPARK_DAEMON_MEMORY": "256m", "SPARK_LOCAL_DIRS": str(self.folder / f"local{node}")}
        timeout = f"-Dspark.worker.timeout={self.worker_timeout_s}"
        own |= {"PYTHONPATH": str(ROOT), "SPARK_WORKER_OPTS": timeout}
        own |= {"SPARK_MASTER_OPTS": f"{timeout} -Dspark.deploy.maxExecutorRetries=-1"}
        return {**os.environ, **own}

    def _await(self, name: str, words: str, timeout_s: float = 120.0) -> None:
        deadline, log = time.monotonic() + timeout_s, self.folder / f"{name}.log"
        while words not in log.read_text(errors="replace"):
            if time.monotonic() > deadline or self._processes[name].poll() is not None:
                raise RuntimeError(f"{name} did not say {words!r}:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)

    def driver(self, script: str, *args: str, log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """A driver program in the master's namespace, its output into `log`."""
        command = ["ip", "netns", "exec", self.namespace(0), sys.executable, script, *args]
        with open(log, "ab") as output:
            return subprocess.Popen(
                command,
                env=self.environment(0) | variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
            )

    def members(self, node: int) -> list[psutil.Process]:
        """Every process in a node's namespace."""
        pids = subprocess.run(
            ["ip", "netns", "pids", self.namespace(node)], capture_output=True, text=True, check=True
        ).stdout.split()
        found = []
        for pid in pids:
            try:
                found.append(psutil.Process(int(pid)))
            except psutil.NoSuchProcess:
                continue
        return found

    def find(self, node: int, words: str) -> list[psutil.Process]:
        """Processes of a node whose command line has `words`."""
        found = []
        for process in self.members(node):
            try:
                if words in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def kill_worker(self, node: int) -> None:
        for process in self.find(node, "deploy.worker.Worker"):
            process.kill()
        self._processes.pop(f"worker{node}").wait()

    def link(self, node: int, up: bool) -> None:
        sh("ip", "link", "set", f"{self.prefix}v{node}", "up" if up else "down")

    def slow(self, node: int, rate: str | None) -> None:
        """Limit what a node receives (`1mbit`), or lift the limit."""
        device = f"{self.prefix}v{node}"
        if rate is None:
            sh("tc", "qdisc", "del", "dev", device, "root")
        else:
            sh("tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")

    def fill_disk(self) -> None:
        """To the last byte, until `free_disk`."""
        with open(self.disk / "ballast", "wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 20))

    def free_disk(self) -> None:
        (self.disk / "ballast").unlink(missing_ok=True)

    def listeners(self, node: int) -> list[tuple[str, set[int]]]:
        """(address:port, process ids that hold it) of every TCP port listened on in a node."""
        shown = subprocess.run(
            ["ip", "netns", "exec", self.namespace(node), "ss", "-Hltnp"], capture_output=True, text=True, check=True
        ).stdout
        return [(line.split()[3], {int(pid) for pid in re.findall(r"pid=(\d+)", line)}) for line in shown.splitlines()]

    def stop(self) -> None:
        for node in range(self.workers + 1):
            for process in self.members(node):
                try:
                    process.send_signal(signal.SIGCONT)
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
        for process in self._processes.values():
            process.kill()
            process.wait()
        for node in range(self.workers + 1):
            subprocess.run(["ip", "netns", "del", self.namespace(node)], capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)
        subprocess.run(["umount", "--lazy", str(self.disk)], capture_output=True)


@contextmanager
def running(folder: Path, workers: int = 3, **options: Any) -> Iterator[Cluster]:
    cluster = Cluster(folder, workers, **options)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
