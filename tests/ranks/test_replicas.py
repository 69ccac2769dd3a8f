"""Ranks that train weights of their own: against the ring, against replicas by torch alone, through checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparkring.conf.blocks.parallel import AveragingConfig
from sparkring.training.parallel.averaging.rules import peers_of
from sparkring.training.parallel.gradients import REACH_STEPS
from tests.ranks.cases_replicas import Naive
from tests.ranks.problem import EXACT

pytestmark = pytest.mark.ranks
TORCH, HOROVOD = {"engine": "torch"}, {"engine": "horovod"}
EVERY_STEP = {"averaging": {"kind": "local_sgd", "every": 1}}
UNEVEN = {"model": "net", "uneven": True, "accumulate": 2}
LOCAL = {"averaging": {"kind": "local_sgd", "every": 3}, "optimizer": "adamw", "clip": 0.5}
AS_LOCAL = {"averaging": {"kind": "diloco", "every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}}
DILOCO = {**LOCAL, "averaging": {"kind": "diloco", "every": 3, "outer_lr": 0.7, "outer_momentum": 0.9}}
EASGD = {**LOCAL, "averaging": {"kind": "easgd", "every": 3, "elasticity": 0.6}}
GOSSIP = {**LOCAL, "averaging": {"kind": "gossip", "every": 3}}
# With this seed the pairs of windows 1 and 2 are others than those of steps 3 and 6, at which these end.
PAIRS = {**LOCAL, "averaging": {"kind": "gossip", "every": 3, "peers": "random", "seed": 1}}
AVERAGED = {**LOCAL, "averaging": {"kind": "local_sgd", "every": 3, "inner_state": "averaged"}}


def worst(ranks: list[Any], part: str, expected: dict[str, torch.Tensor]) -> float:
    """Largest difference of any rank's tensors to the expected ones."""
    return max(float((rank[part][name] - tensor).abs().max()) for rank in ranks for name, tensor in expected.items())


def test_an_average_after_every_step_is_the_ring(launch: Any) -> None:
    """Rows of other weights, padding, accumulation, a rank without rows, layers that few rows reach; buffers too."""
    cases = {
        "ring uneven": {**TORCH, **UNEVEN},
        "local_sgd uneven": {**TORCH, **UNEVEN, **EVERY_STEP},
        "diloco uneven": {**TORCH, **UNEVEN, **AS_LOCAL},
        "diloco momentum": {**TORCH, "optimizer": "momentum", **AS_LOCAL},
        "ring momentum": {**TORCH, "optimizer": "momentum", "sync_batch_norm": False},  # as replicas see their own rows
        "local_sgd momentum": {**TORCH, "optimizer": "momentum", **EVERY_STEP},
    }
    ranks = launch(3, "cases_replicas:trained", {"cases": cases, "steps": 8})
    for name in ("uneven", "momentum"):
        expected = ranks[0][f"ring {name}"]["weights"]
        found = [rank[f"{kind} {name}"] for rank in ranks for kind in ("local_sgd", "diloco")]
        assert worst(found, "weights", expected) <= EXACT, name
        assert worst(found, "evaluated", expected) <= EXACT, name
        assert max(float(t.abs().max()) for t in expected.values()) > 0.1


def test_a_window_is_each_replicas_own_training(launch: Any) -> None:
    """Each clips its own gradient; moments stay, or are averaged; inside a window the mean is evaluated."""
    cases = {"local": {**TORCH, **LOCAL}, "averaged": {**TORCH, **AVERAGED}}
    ranks = launch(3, "cases_replicas:trained", {"cases": cases, "steps": 7})
    ends = {}
    for name, case in cases.items():
        naive = Naive(3, case)
        naive.train(7, average_all if name == "averaged" else Naive.average_weights)
        for number, found in enumerate(rank[name] for rank in ranks):
            assert worst([found], "weights", naive.named(number)) <= EXACT, name
            assert found["restored"], name
        means = {key: sum(naive.named(each)[key] for each in range(3)) / 3 for key in naive.named(0)}
        assert worst([rank[name] for rank in ranks], "evaluated", means) <= EXACT, name
        ends[name] = means
        evaluated = [rank[name]["evaluated"] for rank in ranks]
        assert all(torch.equal(each[key], evaluated[0][key]) for each in evaluated for key in each), name
    assert any(not torch.equal(ends["local"][key], ends["averaged"][key]) for key in ends["local"])


def test_diloco_is_sgd_with_nesterov_momentum_on_what_a_window_has_moved(launch: Any) -> None:
    """By torch's own optimizer; within a window the anchor is evaluated as if the window had ended."""
    ranks = launch(3, "cases_replicas:trained", {"cases": {"diloco": {**TORCH, **DILOCO}}, "steps": 7})
    naive = Naive(3, DILOCO)
    anchor = [weight.detach().clone().requires_grad_() for weight in naive.weights[0]]
    outer = torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True)

    def outer_step() -> None:
        for a, same in zip(anchor, zip(*naive.weights, strict=True), strict=True):
            a.grad = a.detach() - sum(same).detach() / 3
        outer.step()

    def follow(_: Naive) -> None:
        outer_step()
        for a, same in zip(anchor, zip(*naive.weights, strict=True), strict=True):
            for weight in same:
                weight.copy_(a)

    naive.train(7, follow)
    for number, rank in enumerate(ranks):
        assert worst([rank["diloco"]], "weights", naive.named(number)) <= EXACT
    outer_step()
    expected = dict(zip(naive.named(0), [a.detach() for a in anchor], strict=True))
    assert worst([rank["diloco"] for rank in ranks], "evaluated", expected) <= EXACT


def test_easgd_and_gossip_are_their_formulas(launch: Any) -> None:
    cases = {"easgd": EASGD, "gossip": GOSSIP, "pairs": PAIRS}
    payload = {"cases": {name: {**TORCH, **case} for name, case in cases.items()}, "steps": 7}
    ranks = launch(3, "cases_replicas:trained", payload)
    centers = [weight.detach().clone() for weight in Naive(3, EASGD).weights[0]]
    windows = iter((1, 2))

    def draw(naive: Naive) -> None:
        for number, same in enumerate(zip(*naive.weights, strict=True)):
            mean = sum(same) / 3
            for weight in same:
                weight.add_(0.6 / 3 * (centers[number] - weight))
            centers[number] = centers[number] + 0.6 * (mean - centers[number])

    def pair(naive: Naive) -> None:
        window, config = next(windows), AveragingConfig(**PAIRS["averaging"])
        left, right = (r for r in range(3) if peers_of(config, window, r, 3))
        for mine, theirs in zip(naive.weights[left], naive.weights[right], strict=True):
            mean = (mine + theirs) / 2
            mine.copy_(mean)
            theirs.copy_(mean)

    for name, on_window in {"easgd": draw, "gossip": Naive.average_weights, "pairs": pair}.items():  # a ring of 3: all
        naive = Naive(3, cases[name])
        naive.train(7, on_window)
        for number, rank in enumerate(ranks):
            assert worst([rank[name]], "weights", naive.named(number)) <= EXACT, name
        expected = {key: sum(naive.named(each)[key] for each in range(3)) / 3 for key in naive.named(0)}
        if name == "easgd":
            expected = dict(zip(naive.named(0), centers, strict=True))
        assert worst([rank[name] for rank in ranks], "evaluated", expected) <= EXACT, name
        assert all(rank[name]["restored"] for rank in ranks)


def test_hosts_are_the_ring_inside_and_replicas_between(launch: Any) -> None:
    """Of one size or not, with clipping of the host's sum; one host is the ring, bit for bit."""
    apart = {**TORCH, "model": "net", "optimizer": "momentum", "clip": 0.5}
    apart["averaging"] = {"kind": "local_sgd", "every": 3, "groups": "host"}
    cases = {
        "two": {**apart, "local_size": 2},
        "one": {**apart, "local_size": 4},
        "ring": {**apart, "averaging": {}, "local_size": 4},
        "every step": {**TORCH, **UNEVEN, "local_size": 2, "averaging": {**apart["averaging"], "every": 1}},
        "ring uneven": {**TORCH, **UNEVEN},
    }
    ranks = launch(4, "cases_replicas:trained", {"cases": cases, "steps": 7})
    naive = Naive(2, cases["two"])
    naive.train(7, Naive.average_weights)
    for number, rank in enumerate(ranks):
        assert worst([rank["two"]], "weights", naive.named(number // 2)) <= EXACT
        assert rank["two"]["measured"]["sent_bytes between hosts"] > 0
    for name in ("weights", "evaluated"):
        assert all(torch.equal(rank["one"][name][k], t) for rank in ranks for k, t in rank["ring"][name].items())
    expected = ranks[0]["ring uneven"]["weights"]
    assert worst([rank["every step"] for rank in ranks], "weights", expected) <= EXACT
    evaluated = [rank["two"]["evaluated"] for rank in ranks]
    assert all(torch.equal(each[key], evaluated[0][key]) for each in evaluated for key in each)


def average_all(naive: Naive) -> None:
    naive.average_weights()
    naive.average_moments()


def test_a_replica_skips_a_step_alone_and_all_count_it_when_the_window_ends(launch: Any) -> None:
    cases = {"local": {**TORCH, **LOCAL}, "fp16": {**TORCH, **AVERAGED, "precision": "fp16"}}
    ranks = launch(3, "cases_replicas:trained", {"cases": cases, "steps": 6, "bad_step": 1}, timeout_s=60)
    for name in cases:
        infos = [rank[name]["infos"] for rank in ranks]
        assert [[info.skipped for info in each] for each in infos[:2]] == [[False] * 6] * 2
        assert [info.skipped for info in infos[2]] == [False, True, False, False, False, False]
        assert infos[2][1].first_bad_rank == 2
        assert [[info.counted_skips for info in each] for each in infos] == [[0, 0, 1, 0, 0, 0]] * 3
        weights = [rank[name]["weights"] for rank in ranks]
        assert all(torch.equal(each[key], weights[0][key]) for each in weights for key in each)
        assert all(bool(t.isfinite().all()) for t in weights[0].values())
    for rank in ranks:  # the largest count of steps, where moments are averaged
        assert {float(v) for k, v in rank["fp16"]["moments"].items() if k.endswith(".step")} == {6.0}


def test_a_host_that_skips_a_step_counts_it_once_whatever_ranks_it_has(launch: Any) -> None:
    averaging = {"kind": "local_sgd", "every": 3, "groups": "host"}
    cases = {"hosts": {**TORCH, "model": "net", "local_size": 2, "averaging": averaging}}
    ranks = launch(4, "cases_replicas:trained", {"cases": cases, "steps": 6, "bad_step": 1}, timeout_s=60)
    infos = [rank["hosts"]["infos"] for rank in ranks]
    assert [[info.skipped for info in each] for each in infos[2:]] == [[False, True, False, False, False, False]] * 2
    assert [[info.counted_skips for info in each] for each in infos] == [[0, 0, 1, 0, 0, 0]] * 4


def test_a_replica_without_rows_for_many_steps_is_no_parameter_that_nothing_reaches(launch: Any) -> None:
    case = {**TORCH, **LOCAL, "uneven": True}
    ranks = launch(3, "cases_replicas:trained", {"cases": {"local": case}, "steps": REACH_STEPS + 2}, timeout_s=60)
    assert all(len(rank["local"]["infos"]) == REACH_STEPS + 2 for rank in ranks)


SAVED = {  # name -> case, steps before the checkpoint
    "in a window": ({**TORCH, **LOCAL}, 4),
    "averaged, in a window": ({**TORCH, **AVERAGED}, 5),
    "at its end": ({**TORCH, **LOCAL}, 3),
    "diloco": ({**TORCH, **DILOCO}, 5),
    "easgd": ({**TORCH, **EASGD}, 4),
    "pairs": ({**TORCH, **PAIRS}, 6),
    "averaged, at its end": ({**TORCH, **AVERAGED}, 3),
}


@pytest.mark.parametrize(
    ("engine", "names"),
    [("torch", list(SAVED)), pytest.param("horovod", ["in a window", "diloco"], marks=pytest.mark.slow)],
)
def test_a_resume_goes_on_bit_for_bit_another_world_with_the_means_and_the_ring_or_one_rank_with_what_was_scored(
    launch: Any, tmp_path: Path, engine: str, names: list[str]
) -> None:
    cases = {name: ({**SAVED[name][0], "engine": engine}, SAVED[name][1]) for name in names}
    ranks = launch(3, "cases_replicas:save_and_resume", {"cases": cases, "folder": str(tmp_path)}, engine=engine)
    for name in names:
        for found in (rank[name] for rank in ranks):
            for left, right in zip(found["went_on"][:3], found["resumed"][:3], strict=True):
                assert all(torch.equal(left[key], right[key]) for key in left), name
            assert found["went_on"][3] == found["resumed"][3], "skipped steps of the open window are counted once"
            assert all(torch.equal(found["evaluated"][k], v) for k, v in found["evaluated_again"].items()), name
    others = {name: (name, dict(case)) for name, (case, _) in cases.items()}
    others |= {f"{name}, ring": (name, {"engine": engine, "optimizer": "adamw"}) for name in names}
    apart = [name for name in names if name in ("diloco", "easgd")]  # whose means are not what is evaluated
    others |= {f"{name}, local_sgd": (name, {**LOCAL, "engine": engine}) for name in apart}
    others |= {f"{name}, gossip": (name, {**GOSSIP, "engine": engine}) for name in apart if engine == "torch"}
    fewer = launch(2, "cases_replicas:resume_elsewhere", {"cases": others, "folder": str(tmp_path)}, engine=engine)
    fewer += launch(1, "cases_replicas:resume_elsewhere", {"cases": others, "folder": str(tmp_path)})
    for name, (saved, _) in others.items():
        means = mean_of([rank[saved]["saved"] for rank in ranks])
        moments = mean_of([rank[saved]["moments"] for rank in ranks])
        scored = ranks[0][saved]["evaluated"]
        for number, found in enumerate(rank[name] for rank in fewer):
            trained = {key: mean for key, mean in means.items() if "running" not in key and "batches" not in key}
            if name == saved and number < 2:  # two ranks of the same kind
                assert worst([found], "began", trained) <= 1e-15, name
                assert worst([found], "evaluated", scored) <= 1e-15, name
            else:
                assert all(torch.equal(found["began"][key], value) for key, value in scored.items()), name
            assert worst([found], "moments", {k: v for k, v in moments.items() if not k.endswith("step")}) <= 1e-15
            assert found["clock"] in (None, cases[saved][1])
        after = [rank[name]["after"] for rank in fewer[:2]]
        assert all(torch.equal(after[0][key], after[1][key]) for key in after[0]), "both ranks evaluate the same"
        assert any(not torch.equal(after[0][key], means[key]) for key in means), "it trains on"


def mean_of(everyone: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: sum(each[name].double() for each in everyone) / len(everyone) for name in everyone[0]}


def test_horovod_averages_too(launch: Any) -> None:
    cases = {
        "ring": {**HOROVOD, **UNEVEN},
        "local_sgd": {**HOROVOD, **UNEVEN, **EVERY_STEP},
        "diloco": {**HOROVOD, **UNEVEN, **AS_LOCAL},
    }
    ranks = launch(2, "cases_replicas:trained", {"cases": cases, "steps": 6}, engine="horovod")
    expected = ranks[0]["ring"]["weights"]
    for name in list(cases)[1:]:
        assert worst([rank[name] for rank in ranks], "weights", expected) <= EXACT, name
