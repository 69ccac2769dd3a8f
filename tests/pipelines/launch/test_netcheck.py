"""Network measurement: the tournament and the arithmetic, then real ranks on a real Spark."""

from __future__ import annotations

import itertools
import re
from typing import Any, get_args

import pytest

from sparkring.conf.blocks.parallel import CompressConfig
from sparkring.pipelines.cli import main
from sparkring.pipelines.launch.netcheck import (
    CodingCost,
    NetReport,
    Pair,
    nccl_transport,
    ring_bandwidth,
    rounds,
    summarize,
)


@pytest.mark.parametrize("world", range(1, 12))
def test_every_pair_meets_once_and_nobody_is_in_two_pairs_of_a_round(world: int) -> None:
    found = rounds(world)
    assert sorted(pair for matches in found for pair in matches) == list(itertools.combinations(range(world), 2))
    for matches in found:
        ranks = [rank for pair in matches for rank in pair]
        assert len(ranks) == len(set(ranks))


def test_a_codec_that_sends_more_than_the_dense_ring_saves_no_time() -> None:
    report = NetReport(("h",) * 300, "TCP", (), 1e9, 1e9, (CodingCost("topk", 0.01, 24e6, 16e6),))
    assert "topk: 150.0% of the bytes, 10 ms of coding per 16 MiB: saves none among 300 ranks; here" in report.text()


def test_the_ring_formula() -> None:
    assert ring_bandwidth(4, 100, 2.0) == pytest.approx(75.0)
    assert ring_bandwidth(1, 100, 2.0) == 0.0


def test_a_report_takes_the_worse_of_both_ends_and_predicts_from_the_slowest_pair() -> None:
    def result(*pairs: list[float]) -> dict[str, Any]:
        found = {"pairs": list(pairs), "ring_bytes_per_s": 5e8, "transport": "Gloo, TCP on eth0", "host": "h"}
        return found | {"codecs": [["int8", 0.01 * (1 + len(pairs)), 4e6, 16e6]]}

    report = summarize([result([1, 1e-5, 1e9], [2, 2e-5, 8e8]), result([0, 3e-5, 9e8], [2, 1e-5, 1e9]), result()])
    assert report.pairs == (Pair(0, 1, 3e-5, 9e8), Pair(0, 2, 2e-5, 8e8), Pair(1, 2, 1e-5, 1e9))
    assert report.predicted_bytes_per_s == 8e8
    assert "0 - 1: 30 us, 7.20 Gbit/s" in report.text()
    assert "4.00 Gbit/s bus bandwidth measured, 6.40 predicted" in report.text()
    said = "int8: 25.0% of the bytes, 30 ms of coding per 16 MiB: saves time below 3.20 Gbit/s; here an exchange takes"
    assert report.text().endswith(f"{said} 1.19 of the dense ring's time"), "coding of the slowest rank"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("Channel 00 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA", "NCCL: RDMA"),
        ("NCCL INFO NET/Socket : Using [0]eth0\n via SHM/direct/direct", "NCCL: shared memory, TCP"),
        ("NCCL INFO + NVL[22.0] - GPU/52000\n Channel 01 via P2P/CUMEM", "NCCL: NVLink, P2P"),
        ("", "NCCL: its log does not say what"),
    ],
)
def test_the_transport_is_what_nccl_says(log: str, expected: str) -> None:
    assert nccl_transport(log) == expected


@pytest.mark.spark
@pytest.mark.ranks
def test_the_command_measures_two_ranks_of_a_real_stage(spark: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["netcheck", "flights"]) == 0
    first, *ranks, pair, ring = (lines := capfd.readouterr().out.strip().splitlines()[-12:])[:5]
    assert first == "2 ranks over Gloo, TCP on lo"
    assert [line.split(":")[0].strip() for line in ranks] == ["rank 0", "rank 1"]
    latency_us, rate = re.fullmatch(r"  0 - 1: ([\d,]+) us, ([\d.]+) Gbit/s", pair).groups()  # type: ignore[union-attr]
    assert 0 < int(latency_us.replace(",", "")) < 1e6 and float(rate) > 0
    measured = re.match(r"ring: ([\d.]+) Gbit/s bus bandwidth measured", ring)
    assert measured and float(measured[1]) > 0
    assert [line.partition(":")[0] for line in lines[5:]] == list(
        get_args(CompressConfig.model_fields["codec"].annotation)
    )[1:]
    assert all(float(re.search(r", ([\d,]+) ms of coding", line)[1].replace(",", "")) > 0 for line in lines[5:])  # type: ignore[index]
