"""What tests of several sources share."""

from __future__ import annotations

import pytest

from tests.spark_connect import needs_connect


@pytest.fixture(params=["classic", "connect"])
def session_kind(request: pytest.FixtureRequest) -> str:
    """The kind of session of a test that runs on each, asked for first: nothing is set up for one that is not there."""
    if request.param == "connect":
        needs_connect()
    return str(request.param)
