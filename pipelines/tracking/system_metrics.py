"""What the driver's machine does, under the names MLflow's UI groups as system metrics."""

from __future__ import annotations

import time

import psutil


class SystemSampler:
    """Samples CPU, memory, disk and network; rates are means since the sample before."""

    def __init__(self) -> None:
        self._disk, self._network = psutil.disk_io_counters(), psutil.net_io_counters()
        self._at = time.monotonic()
        psutil.cpu_percent()

    def sample(self) -> dict[str, float]:
        memory, disk, network = psutil.virtual_memory(), psutil.disk_io_counters(), psutil.net_io_counters()
        elapsed_s = max(time.monotonic() - self._at, 1e-3)
        values = {
            "system/cpu_utilization_percentage": psutil.cpu_percent(),
            "system/system_memory_usage_megabytes": memory.used / 1e6,
            "system/system_memory_usage_percentage": memory.percent,
            "system/driver_memory_usage_megabytes": psutil.Process().memory_info().rss / 1e6,
        }
        for name, before, after in (("disk", self._disk, disk), ("network", self._network, network)):
            if before is None or after is None:
                continue
            read, written = ("read_bytes", "write_bytes") if name == "disk" else ("bytes_recv", "bytes_sent")
            for label, counter in (("in", read), ("out", written)):
                rate = (getattr(after, counter) - getattr(before, counter)) / elapsed_s / 1e6
                values[f"system/{name}_{label}_megabytes_per_s"] = rate
        self._disk, self._network, self._at = disk, network, time.monotonic()
        return values
