"""What a trial's configuration is made of. Whole sweeps are in tests/e2e/test_sweep.py."""

from __future__ import annotations

from sparkring.conf.load import load_config
from sparkring.pipelines.sweep.job import Sweep
from sparkring.pipelines.sweep.space import SweepSpec

SPEC = SweepSpec.model_validate({"space": {"optim.lr": {"low": 0.001, "high": 0.1}}})


def test_a_trial_is_scored_on_no_test_rows_and_promotes_nothing() -> None:
    recipe = ["report.must_beat=[auc]", "report.share_by=[origin]", "train.test_split=test"]
    sweep = Sweep(
        load_config("flights", recipe), lambda more: load_config("flights", [*recipe, *more]), SPEC, "auc", "max"
    )
    config = sweep.trial_config({"optim.lr": 0.02}).config
    assert config.name == "flights-sweep" and config.optim.lr == 0.02
    assert (config.train.best_metric, config.train.best_mode, config.train.test_split) == ("auc", "max", None)
    assert config.report.must_beat == config.report.must_beat_trees == config.report.share_by == []
    assert config.promote is None and config.drift is None
