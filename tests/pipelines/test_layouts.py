"""`sparkring plan search`, `plan show --cluster` and `plan calibrate`, as a user runs them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from sparkring.conf.clusters.catalog import load_cluster
from sparkring.conf.load import load_config
from sparkring.pipelines.cli import main, measured_runs
from sparkring.pipelines.cli.measured_runs import JobStep, JobSteps
from sparkring.pipelines.model import layouts
from sparkring.pipelines.model.layouts import duration_text, price_text, rate_text
from sparkring.pipelines.model.sizes import size_text
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.training.planner import search
from tests.helpers.published_steps import counts_of, read_measurements

SMALL = ["gpt-124m", "model.args.layers=2", "model.args.vocab=1024", "etl.text.seq_len=129"]
EFA = ["--cluster", "a100-80gb-efa"]


@pytest.fixture(scope="module", autouse=True)
def each_plan_once() -> Iterator[None]:
    """Trace a recipe once, and search it once for each cluster and question: most commands here ask of one model."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("traced_recipe", "planned", "searched"):
            patched.setattr(layouts, name, once(getattr(layouts, name)))
        patched.setattr(search, "loss_bytes", once(search.loss_bytes))
        yield


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call the function once for each of its arguments, as they are shown."""
    known: dict[str, Any] = {}

    def found(*words: Any) -> Any:
        if (key := repr(words)) not in known:
            known[key] = function(*words)
        return known[key]

    return found


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == Exit.OK
    return capsys.readouterr().out


def problem(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == Exit.USAGE
    return capsys.readouterr().err


def test_the_best_layouts_are_shown_with_seconds_memory_and_price(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "search", *SMALL, *EFA, "--devices", "8")
    assert "1. dp(" in text and " per device" in text and "US dollars" in text and "checkpoint.every_s" in text
    assert " for 50,000 steps, " in text


def test_the_layouts_as_json_are_those_of_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output(capsys, "search", *SMALL, *EFA, "--devices", "8", "--json"))
    assert set(found) == {"cluster", "model", "tried", "layouts", "why"}
    assert found["cluster"]["name"] == "a100-80gb-efa" and found["tried"]["fit"] <= found["tried"]["layouts"]
    assert found["model"]["recipe"] == "gpt-124m" and found["why"]["reasons"][0] == "the best"
    found = found["layouts"]
    assert 1 <= len(found) <= 5
    seconds = [each["step_s"] for each in found]
    assert seconds == sorted(seconds)
    assert sum(found[0]["seconds_by_cause"].values()) == pytest.approx(seconds[0])
    assert found[0]["layout"]["dp"] * found[0]["layout"]["tp"] * found[0]["layout"]["pp"] <= 8


def test_the_best_layout_is_written_as_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "planned.yaml")
    words = ["search", "gpt-1b", *EFA, "--devices", "8", "--json", "--write", path]
    best = json.loads(output(capsys, *words))["layouts"][0]["layout"]
    written = load_config(path).config
    assert written.parallel.model_dump(include=set(best)) == best
    assert written.launch.world == best["dp"] * best["cp"] * best["pp"] * best["tp"]
    assert written.model == load_config("gpt-1b").config.model


def test_a_mesh_that_the_rules_refuse_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "search", *SMALL, *EFA, "--devices", "8", "--why", "dp=4,pp=2")
    assert "parallel.pp=2 on CUDA with dp(4)" in text and "it would be at best dp(4) * pp(2)" in text
    assert "place" in output(capsys, "search", *SMALL, *EFA, "--devices", "8", "--why", "dp=8")


def with_memory(folder: Path, device_gib: float, host_gib: float = 1152) -> list[str]:
    path = folder / "tight.yaml"
    path.write_text(f"extends: a100-80gb-efa\ndevice: {{memory_gib: {device_gib}}}\nnode: {{memory_gib: {host_gib}}}\n")
    return ["--cluster", str(path), "--devices", "8"]


def test_a_model_that_only_fits_offloaded_is_offloaded_and_written_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, path = (
        ["search", *SMALL, "train.eval_batch=null", *with_memory(tmp_path, 0.03)],
        str(tmp_path / "planned.yaml"),
    )
    best = json.loads(output(capsys, *words, "--json", "--write", path))["layouts"][0]
    assert best["layout"]["offload"] and best["host_gib"] > 0 and best["seconds_by_cause"]["offload"] > 0
    written = load_config(path).config.parallel
    assert written.offload and written.zero == best["layout"]["zero"] and written.precision == "bf16"
    text = output(capsys, *words)
    assert ", offload, bf16" in text and " of its host, " in text
    text = problem(capsys, "search", *SMALL, "train.eval_batch=null", *with_memory(tmp_path, 0.03, 0))
    assert "no layout fits" in text and "node.memory_gib of the cluster, to offload to it" in text


def test_offload_where_it_is_not_needed_has_a_place_and_a_price(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["search", *SMALL, *EFA, "--devices", "8", "--why"]
    text = output(capsys, *words, "dp=8,offload=true")
    assert text.startswith("dp(8), offload: place ") and ", offload, bf16" in text
    assert "slower than the best: " in text or "times as long as the best: " in text
    assert "offload" not in output(capsys, *words, "dp=8,offload=false").partition(": ")[2]
    text = output(capsys, *words, "dp=8,precision=fp32")
    assert text.startswith("dp(8), fp32: place ") and "bf16" not in text


def test_a_host_without_room_for_what_is_offloaded_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--why", "dp=8,offload=true"]
    text = output(capsys, "search", *SMALL, *with_memory(tmp_path, 40, 0.01), *asked)
    assert "not among the layouts that can run and fit" in text and "the host has no room: " in text
    text = output(capsys, "search", *SMALL, *with_memory(tmp_path, 40, 0), *asked)
    assert "of 0, since node.memory_gib is not known" in text


def test_any_precision_is_searched_only_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["search", *SMALL, *EFA, "--devices", "8", "parallel.precision=fp32", "train.compile=false", "--json"]
    for flag, precision in ([], "fp32"), (["--any-precision"], "bf16"):
        found = json.loads(output(capsys, *words, *flag))["layouts"]
        assert found[0]["layout"]["precision"] == precision


class Asks(nn.Module):
    """Its forward wants values, which the meta device has not."""

    def __init__(self, vocab: int, width: int, **_: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embed(tokens))
        return out if (tokens > 0).any() else -out


ASKS = [*SMALL, f"model.factory={__name__}:Asks", "train.compile=false", *EFA, "--devices", "8"]
NUMEL = 2 * 1024 * 768  # of Asks


def test_a_model_that_cannot_be_traced_is_searched_by_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "search", *ASKS)
    assert "activations, the loss and seconds are not planned: Asks's forward cannot be run on the meta device" in text
    assert "29 of 29 layouts that can run hold" in text and "dp(8), zero 1, bf16: " in text
    known = json.loads(output(capsys, "search", *ASKS, "--json"))
    assert set(known) == {"cluster", "model", "tried", "layouts", "why"} and "meta device" in known["why"]["reasons"][0]
    ring, *_ = (each for each in known["layouts"] if not each["layout"]["zero"])
    assert ring["state_bytes"] == 4 * NUMEL * 4 and ring["step_s"] is None
    assert ring["sent_bytes"] == pytest.approx(2 * 7 / 8 * 4 * NUMEL, rel=1e-4)
    text = output(capsys, "search", *ASKS, "--why", "dp=4,tp=2")
    assert "sharding plan" in text
    text = output(capsys, "search", *ASKS, "--why", "dp=8")
    assert "dp(8), bf16: 24.0 MiB, sends 10.5 MiB a step" in text and "dp(7)" not in text


class OneHot(nn.Module):
    """Has nothing to train."""

    def __init__(self, vocab: int, **_: int) -> None:
        super().__init__()
        self.vocab = vocab

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.one_hot(tokens, self.vocab).float()


@pytest.mark.parametrize("words", [["show"], ["search", *EFA, "--devices", "8"]], ids=["show", "search"])
def test_a_model_without_parameters_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    given = [words[0], *SMALL, f"model.factory={__name__}:OneHot", "train.compile=false", *words[1:]]
    assert "1 problem\n  - the model has no trainable parameters" in problem(capsys, *given)


def test_what_needs_seconds_is_refused_where_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--any-precision: 1 problem\n  - need seconds" in problem(capsys, "search", *ASKS, "--any-precision")
    text = problem(capsys, "search", *ASKS, "--within", "3d")
    assert "--within: 1 problem\n  - need seconds, which are not planned: Asks's forward" in text


def test_weights_that_fit_nowhere_name_the_smallest_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text("extends: a100-80gb-efa\ndevice: {memory_gib: 0.002}\n")
    text = output(capsys, "search", *ASKS[:-4], "--cluster", str(path), "--devices", "8")
    assert "none; the smallest, dp(8), zero " in text
    text = output(capsys, "search", *ASKS[:-4], *with_memory(tmp_path, 0.0085))
    assert ", offload, bf16: " in text and " of the host, sends " in text
    no_host = with_memory(tmp_path, 0.0085, 0.01)
    assert ", offload" not in output(capsys, "search", *ASKS[:-4], *no_host).partition("none; ")[0]
    text = output(capsys, "search", *ASKS[:-4], *no_host, "--why", "dp=8,offload=true")
    assert "does not fit" not in text and "; the host has no room: " in text


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


def test_the_advice_says_what_another_precision_gives(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["show", "gpt-124m", *EFA, "model.args.layers=2", "train.compile=false"]
    text = output(capsys, *words, "parallel.precision=fp32")
    (line,) = [line for line in text.splitlines() if line.startswith("with parallel.precision=bf16, which rounds")]
    _, times, less, more = map(float, re.findall(r"[\d.]+", line.partition("takes")[2]))
    assert times < 1 and less < more
    assert "parallel.precision" not in output(capsys, *words)


def test_a_search_whose_best_is_one_device_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "slow.yaml"
    path.write_text("extends: cpu\nnetwork: {gbit_per_s: 0.001}\n")
    words = [*SMALL, "train.global_batch=2", "train.device=cpu", "--cluster", str(path), "--devices", "2"]
    assert "do not distribute: of 1 to 2 devices one is the best" in output(capsys, "search", *words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--cluster", "a100-80gb-efs", "--devices", "8"], "did you mean 'a100-80gb-efa'"),
        ([*EFA, "--devices", "12"], "--devices 12: 1 problem\n  - 12 devices are not whole machines of 8"),
        (
            [*EFA, "--devices", "8", "--why", "dp=9"],
            "--why: 1 problem\n  - the mesh is of 9 devices, and layouts of 1, 2, 3, 4, 5, 6, 7, 8 are tried",
        ),
    ],
)
def test_what_cannot_be_searched_says_why(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in problem(capsys, "search", *SMALL, *words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--devices", "0"], "argument --devices: '0': a whole number, at least 1"),
        (["--devices", "eight"], "argument --devices: 'eight': a whole number, at least 1"),
        (["--devices", "8", "--why", "dp=x"], "argument --why: 'dp=x': 'dp=x' is not an axis and its size"),
        (["--devices", "8", "--why", "dp=8,dp=1"], "argument --why: 'dp=8,dp=1': dp is named twice"),
        (["--devices", "8", "--why", "dp=0"], "argument --why: 'dp=0': 'dp=0' is not an axis and its size"),
        (["--devices", "8", "--why", "dd=8"], "'dd=8' is not an axis and its size; write pp=N, dp=N, cp=N, tp=N"),
        (["--devices", "8", "--why", "dp=8,offload=yes"], "'offload=yes' is not an axis and its size; write pp=N"),
        (["--devices", "8", "--why", "dp=8,precision=fp64"], "offload=true|false, precision=fp32|bf16|fp16"),
        (["--devices", "8", "--why", "dp=8,precision=fp8"], "there is no FP8 here"),
        (["--devices", "8", "--why", ""], "argument --why: '': '' is not an axis and its size"),
        (["--devices", "8", "--within", "0h"], "argument --within: '0h': must be longer than nothing"),
        (["--devices", "8", "--objective", "speed"], "argument --objective: invalid choice: 'speed'"),
    ],
)
def test_a_wrong_option_is_named_before_the_recipe_is_read(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "search", "no-such-recipe", *EFA, *words])
    assert ended.value.code == Exit.USAGE and expected in capsys.readouterr().err


def test_ranks_that_are_not_whole_machines_are_refused_where_a_layout_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = problem(capsys, "show", *SMALL, *EFA, "launch.world=12", "launch.min_world=null", "train.global_batch=12")
    assert "launch.world = 12: 1 problem\n  - 12 devices are not whole machines of 8" in text


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
    (quickest, *_) = json.loads(output(capsys, *words))["layouts"]
    cheapest = json.loads(output(capsys, *words, "--within", "3d"))["layouts"]
    prices = [each["price"] for each in cheapest]
    assert prices == sorted(prices) and prices[0] < quickest["price"]
    assert max(each["hours"] for each in cheapest) <= 72
    tight = f"{int(quickest['hours'] * 3600 * 1.02) + 1}s"
    for found in json.loads(output(capsys, *words, "--within", tight))["layouts"]:
        assert found["hours"] * 3600 <= quickest["hours"] * 3600 * 1.02 + 1
    assert "and end within 3 days; best by cost" in output(capsys, *words[:-1], "--within", "3d")


def test_a_time_in_which_nothing_ends_names_the_quickest(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["search", *SMALL, *EFA, "--devices", "8"]
    text = problem(capsys, *words, "--within", "30s")
    assert "--within 30 seconds: 1 problem\n  - no layout makes the 50,000 steps of gpt-124m in that time" in text
    assert "the quickest, dp(" in text and " takes " in text
    text = problem(capsys, *words, "train.steps=null", "train.epochs=2", "--within", "3d")
    assert "--within 3 days: 1 problem\n  - only the dataset says how many steps an epoch of gpt-124m has" in text
    with pytest.raises(SystemExit):
        main(["plan", *words, "--within", "3 days"])
    assert "'3 days': a duration is a whole number and a unit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(30, "30 seconds"), (180, "3 minutes"), (7200, "2 hours"), (259_200, "3 days"), (3e8, "9.51 years")],
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
    assert "no layout fits in 19.3 MiB per device" in text and "take more devices" in text


def test_a_calibrated_cluster_is_written_and_read_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = read_measurements("benchmarks/published/llmfoundry_a100_80gb.csv")[-25:]
    steps = [JobStep(counts_of(row), row.step_s, row.global_batch, row.tokens) for row in rows]
    monkeypatch.setattr(measured_runs, "job_steps", lambda *_: JobSteps(steps, {}))
    out = tmp_path / "mine.yaml"
    assert "25 steps: mean error" in output(capsys, "calibrate", "--cluster", "a100-80gb-roce", "--out", str(out))
    found = load_cluster(str(out))
    assert found.fitted_on == "25 steps of MLflow" and found.error is not None and found.error < 0.2
    assert "far from" not in caplog.text
    other = ["calibrate", "--cluster", "h100-80gb-roce", "--out", str(tmp_path / "other.yaml")]
    assert "25 steps: mean error" in output(capsys, *other)
    assert "far from what the parameters of h100-80gb-roce predicted" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["dp=64,pp=8", "dp=64,pp=4,tp=2"])
def test_a_plan_for_512_devices_beats_the_usual_answers(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "search", "gpt-70b", *EFA, "--devices", "512", "--why", asked)
    assert "zero-bubble" in text and "% slower than the best: bubble takes" in text


def test_small_prices_and_sizes_keep_digits_that_say_something() -> None:
    assert [price_text(each) for each in (0.13, 9.99, 1234.4, 4_332_054)] == [
        "0.13 US dollars",
        "9.99 US dollars",
        "1,234 US dollars",
        "4.33 million US dollars",
    ]
    assert [size_text(each) for each in (5e7, 2**30, 7.44e10, 24)] == ["47.7 MiB", "1.00 GiB", "69.29 GiB", "24 B"]


def test_rates_of_rows_are_no_powers_of_ten() -> None:
    assert [rate_text(each) for each in (767_400.0, 1965.6, 12.345)] == ["767,400", "1,966", "12.3"]


def test_why_of_the_winner_says_that_it_is_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["plan", "search", *SMALL, "--cluster", "a100-80gb-efa", "--devices", "2", "--json"]) == Exit.OK
    best = json.loads(capsys.readouterr().out)["layouts"][0]["layout"]
    mesh = ",".join(f"{axis}={best[axis]}" for axis in ("dp", "cp", "pp", "tp"))
    assert main(["plan", "search", *SMALL, "--cluster", "a100-80gb-efa", "--devices", "2", "--why", mesh]) == Exit.OK
    assert "the best" in capsys.readouterr().out.splitlines()[-2]


CLUSTERS = {
    "fitted": ("extends: a100-80gb-roce\n", "fitted on 61 steps", "within 5% of them"),
    "another device": (
        "extends: a100-80gb-efa\ndevice: {name: L40S, peak_tflops: {bf16: 362}, memory_gb_per_s: 864}\n",
        "estimates: no step on L40S was measured",
        "25 to 41 % off",
    ),
    "other shares": (
        "extends: a100-80gb-efa\nreached: {matmul: 0.5}\n",
        "estimates: no step on A100",
        "25 to 41 % off",
    ),
    "a band of its own": ("extends: h200-141gb-efa\nerror: 0.3\n", "no step on H200-SXM5-141GB", "within 30% of them"),
}


@pytest.mark.parametrize("kind", CLUSTERS)
def test_wherever_seconds_are_shown_a_sentence_says_what_they_rest_on(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, basis, band = CLUSTERS[kind]
    path, page = tmp_path / "mine.yaml", tmp_path / "page.html"
    path.write_text(text)
    on = [*SMALL, "--cluster", str(path)]
    shown = [output(capsys, "show", *on)]
    shown.append(output(capsys, "search", *on, "--devices", "8"))
    shown.append(output(capsys, "search", *on, "--devices", "8", "--why", "dp=8"))
    shown.append(output(capsys, "search", *on, "--devices", "8", "--why", "dp=4,pp=2"))
    facts = json.loads(output(capsys, "search", *on, "--devices", "8", "--json", "--html", str(page)))
    for each in (*shown, facts["cluster"]["basis"], page.read_text()):
        assert basis in each and band in each


def test_what_is_shown_ends_with_what_a_search_finds(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ["parallel.tp=4", "parallel.zero=3", "parallel.activation_checkpointing=true", "train.compile=false"]
    last = output(capsys, "show", *SMALL, *EFA, *slow).rstrip().splitlines()[-1]
    assert re.fullmatch(
        r"a search finds dp\(8\).*: .* a step, [\d.]+ times as fast; .*--devices 8 and --write FILE.*", last
    )
    found = json.loads(output(capsys, "search", *SMALL, *EFA, "--devices", "8", "--json"))["layouts"][0]["layout"]
    best = [f"parallel.{key}={json.dumps(value)}" for key, value in found.items()]
    last = output(capsys, "show", *SMALL, *EFA, *best, "train.compile=false").rstrip().splitlines()[-1]
    assert last.startswith("a search finds none that is more than 2% faster on 8 devices")


@pytest.mark.parametrize(
    "asked",
    [
        *("dp=8", "tp=8", "cp=8", "pp=8", "dp=2,tp=4", "dp=2,cp=4", "dp=4,pp=2", "tp=3", "cp=5", "pp=7"),
        *("tp=2,cp=2,pp=2", "dp=1,offload=true", "dp=8,offload=true", "dp=8,precision=fp32", "dp=7", "dp=3,tp=2"),
    ],
)
def test_any_mesh_has_a_reason(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["search", *SMALL, *EFA, "--devices", "8", "--why", asked]
    text = output(capsys, *words)
    lines = [line for line in text.splitlines()[1:] if not line.strip().startswith(("it would be", "seconds are"))]
    assert lines, text
    assert not re.search(r"\b(dp|cp|pp|tp)\(1\) \*|\* (dp|cp|pp|tp)\(1\)", text), "no axis of one rank"
    facts = json.loads(output(capsys, *words, "--json"))["why"]
    assert facts["asked"] and facts["reasons"] == [line.strip() for line in text.splitlines()]


def test_the_best_layouts_are_of_as_many_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output(capsys, "search", *SMALL, *EFA, "--devices", "8", "--json"))["layouts"]
    kinds = [
        (
            tuple(each["layout"][axis] > 1 for axis in ("dp", "cp", "pp", "tp")),
            {0: 0, 1: 1, 2: 1, 3: 3}[each["layout"]["zero"]],
        )
        for each in found
        if each["layout"]["dp"] * each["layout"]["cp"] * each["layout"]["pp"] * each["layout"]["tp"] == 8
    ]
    assert len(kinds) == len(set(kinds)) >= 2


def test_rates_are_of_rows_tokens_and_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["search", *SMALL, *EFA, "--devices", "8"]
    best = json.loads(output(capsys, *words, "--json"))["layouts"][0]
    assert best["tokens_per_s_per_device"] == pytest.approx(best["rows_per_s"] * 128 / 8)
    assert best["rows_per_pass"] * best["passes"] * best["layout"]["dp"] == 512
    text = output(capsys, *words)
    assert "MFU " in text and " tokens/s and device" in text and " a pass\n" in text


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_codec_is_advised_only_where_the_rules_take_it(zero: int, capsys: pytest.CaptureFixture[str]) -> None:
    slow = ["--cluster", "a100-80gb-ethernet", "launch.world=16", "launch.min_world=null", "train.compile=false"]
    text = output(capsys, "show", *SMALL, *slow, f"parallel.zero={zero}")
    assert "links are the limit" in text and ("parallel.compress.codec" in text) == (zero == 0)


def test_gpt_70b_is_in_the_layout_that_a_search_finds() -> None:
    config = load_config("gpt-70b").config
    assert (config.parallel.zero, config.parallel.tp, config.parallel.pp, config.parallel.passes) == (3, 1, 1, 1)


@pytest.mark.slow
def test_no_layout_is_much_faster_than_gpt_70bs_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "show", "gpt-70b", *EFA)
    assert "a search finds none that is more than 2% faster on 512 devices" in text


@pytest.mark.parametrize("word", ["fp8", "FP8", "float8_e4m3fn", "e5m2", "bf16-fp8"])
def test_fp8_is_refused_where_it_is_asked_for(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no FP8 here" in problem(capsys, "show", *SMALL, f"parallel.precision={word}")
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: h100-80gb-efa\ndevice: {{peak_tflops: {{{word}: 1979}}}}\n")
    assert "there is no FP8 here" in problem(capsys, "show", *SMALL, "--cluster", str(path))
