from __future__ import annotations

import math

from sparkring.pipelines.tracking.system_metrics import SystemSampler


def test_system_metrics_have_units_and_values() -> None:
    values = SystemSampler().sample()
    assert 0 < values["system/system_memory_usage_percentage"] <= 100
    assert values["system/driver_memory_usage_megabytes"] > 10
    assert all(name.startswith("system/") and math.isfinite(value) for name, value in values.items())
