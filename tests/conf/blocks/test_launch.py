"""What the blocks of ranks refuse by themselves."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from sparkring.conf.blocks.parallel import CompressConfig


@pytest.mark.parametrize("share", [0, -0.1, 1.01])
def test_top_k_of_nothing_or_of_more_than_all_is_refused(share: float) -> None:
    with pytest.raises(ValidationError, match="must be above 0 and at most 1"):
        CompressConfig(share=share)
    assert CompressConfig(share=1).share == 1
