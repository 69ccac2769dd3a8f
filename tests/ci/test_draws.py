"""What tests draw does not depend on which tests ran before: workers of the suite deal them anew each time."""

from __future__ import annotations

import numpy as np
import pytest

DRAWS = np.random.default_rng(3)
FIRST = float(np.random.default_rng(3).random())


@pytest.mark.parametrize("number", [0, 1])
def test_each_test_draws_as_if_it_were_the_first(number: int) -> None:
    assert DRAWS.random() == FIRST and DRAWS.random() != FIRST
