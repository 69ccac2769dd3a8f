"""Clusters as files: the named ones are complete, and every mistake is one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from sparkring.conf.clusters.catalog import cluster_names, cluster_text, load_cluster
from sparkring.conf.errors import ConfigError

BASE = "extends: a100-80gb-efa\n"


def problems(folder: Path, text: str) -> list[str]:
    path = folder / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_cluster(str(path))
    return caught.value.problems


@pytest.mark.parametrize("name", cluster_names())
def test_a_named_cluster_is_complete_and_written_as_it_was_read(name: str, tmp_path: Path) -> None:
    cluster = load_cluster(name)
    assert cluster.description and cluster.device.peak_flops("bf16") >= cluster.device.peak_flops("fp32")
    path = tmp_path / "copy.yaml"
    path.write_text(cluster_text(cluster))
    assert load_cluster(str(path)) == cluster


def test_a_file_changes_single_keys_of_the_one_it_extends(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE + "node: {price_per_hour: 7}\n")
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\nnode: {devices: 4}\n")
    mine, known = load_cluster(str(tmp_path / "mine.yaml")), load_cluster("a100-80gb-efa")
    assert (mine.node.devices, mine.node.price_per_hour) == (4, 7)
    assert (mine.device, mine.node.link_gb_per_s) == (known.device, known.node.link_gb_per_s)


def test_units_are_those_of_the_data_sheet() -> None:
    cluster = load_cluster("a100-80gb-efa")
    assert cluster.device.peak_flops("bf16") == 312e12
    assert cluster.network.bytes_per_s == 50e9
    assert cluster.node.link_bytes_per_s == 300e9


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nod: {devices: 4}\n", "nod: unknown key; did you mean 'node'?"),
        ("node: {device: 4}\n", "node.device: unknown key; did you mean 'devices'?"),
        ("device: {peak_tflops: {bf16: 0}}\n", "device.peak_tflops.bf16 = 0: input should be greater than 0"),
        ("reached: {matmul: 1.5}\n", "reached.matmul = 1.5: input should be less than or equal to 1"),
        ("network: {kind: ethernt}\n", "did you mean 'ethernet'?"),
        ("node: {devices: true}\n", "node.devices = true: must be a number, and this is a boolean"),
        ("device: {peak_tflops: {bf16: 312.0e+12}}\n", "input should be less than or equal to 100000"),
        ("device: {memory_gib: 81920}\n", "device.memory_gib = 81920: input should be less than or equal to 32768"),
        ("network: {gbit_per_s: 100000}\n", "network.gbit_per_s = 100000: input should be less than or equal to 20000"),
        ("node: {memory_gib: 1179648}\n", "node.memory_gib = 1179648: input should be less than or equal to 65536"),
        ("device: {peak_tflops: {bf16: on}}\n", "device.peak_tflops.bf16 = true: must be a number"),
    ],
)
def test_a_wrong_key_or_value_is_one_line_with_the_rule(text: str, problem: str, tmp_path: Path) -> None:
    (found,) = problems(tmp_path, BASE + text)
    assert problem in found


def test_an_incomplete_file_says_which_blocks_are_missing(tmp_path: Path) -> None:
    assert problems(tmp_path, "description: x\n") == [
        f"{k}: is required and missing" for k in ("device", "node", "network")
    ]


def test_files_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    assert "in a circle" in problems(tmp_path, "extends: mine.yaml\n")[0]


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="no such cluster; there are a100-40gb-efa, ") as caught:
        load_cluster("nope")
    assert str(caught.value).count("h200-141gb-efa") == 1
    with pytest.raises(ConfigError, match="did you mean 'a100-80gb-efa'"):
        load_cluster("a100-80gb-efs")


def test_devices_are_whole_machines() -> None:
    cluster = load_cluster("a100-80gb-efa")
    assert [cluster.nodes(n) for n in (1, 8, 16)] == [1, 1, 2]
    with pytest.raises(ValueError, match=r"12 devices are not whole machines of 8 .*multiple of 8"):
        cluster.nodes(12)


@pytest.mark.parametrize("extends", ["", "extends: a100-80gb-efa\n"])
def test_a_file_of_before_contention_says_overlap_and_is_read(extends: str, tmp_path: Path) -> None:
    """Of the seconds beside compute, a share `overlap` was not lost to it."""
    values = {} if extends else load_cluster("cpu").model_dump(mode="json", exclude={"reached"})
    path = tmp_path / "mine.yaml"
    path.write_text(extends + yaml.safe_dump({**values, "reached": {"overlap": 0.9}}))
    assert load_cluster(str(path)).reached.contention == pytest.approx(0.1)
