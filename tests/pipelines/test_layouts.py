"""`sparkring plan search`, `plan show --cluster` and `plan calibrate`, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkring.conf.clusters.catalog import load_cluster
from sparkring.conf.load import load_config
from sparkring.pipelines.cli import main
from sparkring.pipelines.model.layouts import duration_text, gib_text, price_text
from sparkring.pipelines.run.exit_codes import Exit

SMALL = ["gpt-124m", "model.args.layers=2", "model.args.vocab=1024", "etl.text.seq_len=129"]
EFA = ["--cluster", "a100-80gb-efa"]


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == Exit.OK
    return capsys.readouterr().out


def problem(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == Exit.USAGE
    return capsys.readouterr().err


def test_the_best_layouts_are_shown_with_seconds_memory_and_price(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "search", *SMALL, *EFA, "--devices", "8")
    assert "1. dp(" in text and "GiB per device" in text and "US dollars" in text and "checkpoint.every_s" in text
    assert " for 50,000 steps, " in text


def test_the_layouts_as_json_are_those_of_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output(capsys, "search", *SMALL, *EFA, "--devices", "8", "--json"))
    assert 1 <= len(found) <= 5
    seconds = [each["step_s"] for each in found]
    assert seconds == sorted(seconds)
    assert sum(found[0]["seconds_by_cause"].values()) == pytest.approx(seconds[0])
    assert found[0]["layout"]["dp"] * found[0]["layout"]["tp"] * found[0]["layout"]["pp"] <= 8


def test_the_best_layout_is_written_as_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "planned.yaml")
    words = ["search", "gpt-1b", *EFA, "--devices", "8", "--json", "--write", path]
    best = json.loads(output(capsys, *words))[0]["layout"]
    written = load_config(path).config
    assert written.parallel.model_dump(include=set(best)) == best
    assert written.launch.world == best["dp"] * best["cp"] * best["pp"] * best["tp"]
    assert written.model == load_config("gpt-1b").config.model


def test_a_mesh_that_the_rules_refuse_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "search", *SMALL, *EFA, "--devices", "8", "--why", "dp=4,pp=2")
    assert "parallel.pp=2 on CUDA with dp(4)" in text and "it would be at best dp(4) * pp(2)" in text
    assert "place" in output(capsys, "search", *SMALL, *EFA, "--devices", "8", "--why", "dp=8")


def test_a_small_model_is_not_worth_a_ring(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        *SMALL,
        "train.global_batch=16",
        "launch.min_world=null",
        "--cluster",
        "a100-80gb-ethernet",
        "launch.world=16",
    ]
    text = output(capsys, "show", *words)
    assert "do not distribute" in text and "ethernet      100 Gbit" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--cluster", "a100-80gb-efs", "--devices", "8"], "did you mean 'a100-80gb-efa'"),
        ([*EFA, "--devices", "12"], "12 devices are not whole machines of 8"),
        ([*EFA, "--devices", "8", "--why", "dd=8"], "'dd=8' is not an axis and its size"),
        (
            [*EFA, "--devices", "8", "--why", "dp=9"],
            "--why dp=9: is of 9 devices, and layouts of 1, 2, 3, 4, 5, 6, 7, 8 are",
        ),
    ],
)
def test_what_cannot_be_searched_says_why(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in problem(capsys, "search", *SMALL, *words)


def test_the_recipes_cluster_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "launch.cluster=a100-80gb-efa"]
    assert "on A100-SXM4-80GB: dp(8)" in output(capsys, "show", *words)
    assert "on 8 x A100-SXM4-80GB" in output(capsys, "search", *words, "--devices", "8")
    assert "name the cluster to search on" in problem(capsys, "search", *SMALL, "--devices", "8")


def test_a_planned_layout_is_shown_as_a_launch_would_choose_it(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "show", *SMALL, *EFA, "parallel=auto")
    first = text.splitlines()[0]
    assert first.startswith("layout on 8 ranks: dp(") and "planned for a100-80gb-efa" in first
    chosen = first.removeprefix("layout on 8 ranks: ").partition(": ")[0]
    assert f"on A100-SXM4-80GB: {chosen}" in text, "what follows is of that layout"


def test_the_cheapest_layout_in_time_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["search", *SMALL, *EFA, "--devices", "16", "--json"]
    (quickest, *_), cheapest = json.loads(output(capsys, *words)), json.loads(output(capsys, *words, "--within", "3d"))
    prices = [each["price"] for each in cheapest]
    assert prices == sorted(prices) and prices[0] < quickest["price"]
    assert max(each["hours"] for each in cheapest) <= 72
    tight = f"{int(quickest['hours'] * 3600 * 1.02) + 1}s"
    for found in json.loads(output(capsys, *words, "--within", tight)):
        assert found["hours"] * 3600 <= quickest["hours"] * 3600 * 1.02 + 1
    assert "and end within 3 days; best by cost" in output(capsys, *words[:-1], "--within", "3d")


def test_a_time_in_which_nothing_ends_names_the_quickest(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["search", *SMALL, *EFA, "--devices", "8"]
    text = problem(capsys, *words, "--within", "30s")
    assert "--within: no layout makes 50,000 steps in 30 seconds; the quickest, dp(" in text and " takes " in text
    text = problem(capsys, *words, "train.steps=null", "train.epochs=2", "--within", "3d")
    assert "--within: only the dataset says how many steps an epoch has" in text
    with pytest.raises(SystemExit):
        main(["plan", *words, "--within", "3 days"])
    assert "'3 days': a duration is a whole number and a unit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "expected"), [(30, "30 seconds"), (180, "3 minutes"), (7200, "2 hours"), (259_200, "3 days")]
)
def test_a_long_time_is_shown_in_its_largest_unit(seconds: float, expected: str) -> None:
    assert duration_text(seconds) == expected


@pytest.mark.parametrize("file", [".", "no/such/folder/best.yaml"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (["search", *SMALL, *EFA, "--devices", "8", "--write"], ["measure", *SMALL, "--out"]):
        with pytest.raises(SystemExit) as ended:
            main(["plan", *command, file])
        assert ended.value.code == Exit.USAGE and f"{file!r}: cannot be written" in capsys.readouterr().err


def test_nothing_fits_and_it_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text("extends: a100-80gb-efa\ndevice: {memory_gib: 0.02}\n")
    text = problem(capsys, "search", *SMALL, "--cluster", str(path), "--devices", "8")
    assert "no layout fits in 0.019 GiB per device" in text and "take more devices" in text


def test_a_calibrated_cluster_is_written_and_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = Path("benchmarks/published/llmfoundry_a100_80gb.csv").read_text().splitlines()
    rows, out = tmp_path / "steps.csv", tmp_path / "mine.yaml"
    rows.write_text("\n".join([*table[:3], *table[-25:]]) + "\n")
    words = ["calibrate", str(rows), "--cluster", "a100-80gb-roce", "--out", str(out)]
    assert "25 steps: mean error" in output(capsys, *words)
    assert load_cluster(str(out)).fitted_on == "25 steps of steps.csv"
    rows.write_text("\n".join(table[:5]) + "\n")
    assert "2 measured steps cannot determine" in problem(capsys, *words)


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["dp=64,pp=8", "dp=64,pp=4,tp=2"])
def test_a_plan_for_512_devices_beats_the_usual_answers(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "search", "gpt-70b", *EFA, "--devices", "512", "--why", asked)
    assert "% slower than the best: bubble takes" in text


def test_small_prices_and_sizes_keep_digits_that_say_something() -> None:
    assert [price_text(each) for each in (0.13, 9.99, 1234.4)] == [
        "0.13 US dollars",
        "9.99 US dollars",
        "1,234 US dollars",
    ]
    assert [gib_text(each) for each in (5e7, 2**30, 7.44e10)] == ["0.047", "1.0", "69.3"]


def test_why_of_the_winner_says_that_it_is_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["plan", "search", *SMALL, "--cluster", "a100-80gb-efa", "--devices", "2", "--json"]) == Exit.OK
    best = json.loads(capsys.readouterr().out)[0]["layout"]
    mesh = ",".join(f"{axis}={best[axis]}" for axis in ("dp", "cp", "pp", "tp"))
    assert main(["plan", "search", *SMALL, "--cluster", "a100-80gb-efa", "--devices", "2", "--why", mesh]) == Exit.OK
    assert capsys.readouterr().out.rstrip().endswith("the best")
