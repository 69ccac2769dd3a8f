"""Which columns stand beside a prediction."""

from __future__ import annotations

import pytest

from sparkring.conf.blocks.predict import PredictConfig
from sparkring.etl.errors import EtlError
from sparkring.pipelines.predict.rows import check_kept


def test_a_kept_column_does_not_have_the_name_of_a_predicted_one() -> None:
    block = PredictConfig(rows="rows", to="out", keep=["id", "label_red"])
    check_kept(block, ["label_blue", "prediction"])
    with pytest.raises(EtlError, match=r"predict.keep = 'label_red': the model's predictions have a column"):
        check_kept(block, ["label_red", "label_blue"])
