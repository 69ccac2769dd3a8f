"""Every layout that is proven equal to one process: settings by name, per world size. Legal pairs and triples of
dp, cp, pp, tp with ZeRO; what is left out is refused (conf/rules/strategies.py) or differs in no code path."""

from __future__ import annotations

from typing import Any

from tests.ranks.problem import runs_here

ALL_OF_IT = {"compress": {"codec": "topk", "share": 1.0}}  # through a codec that leaves nothing
PIPE = {"pp": 2, "micro_batches": 2}
INTERLEAVED = {**PIPE, "schedule": "interleaved", "stages_per_rank": 2}
ZERO_BUBBLE = {**PIPE, "schedule": "zero-bubble"}

TWO: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp-codec": {"bucket_bytes": 20_000, **ALL_OF_IT},
    "ddp-checkpointing": {"activation_checkpointing": True},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3, "activation_checkpointing": True},
    "zero2-offload": {"zero": 2, "offload": True},
    "zero3-offload": {"zero": 3, "offload": True},
    "zero2-lamb": {"zero": 2, "optimizer": "lamb"},
    "zero3-lars": {"zero": 3, "optimizer": "lars"},
    "tp-lamb": {"tp": 2, "optimizer": "lamb"},
    "zero2-shared": {"zero": 2, "shared": True},
    "zero3-shared": {"zero": 3, "shared": True},
    "tp-shared": {"tp": 2, "shared": True},
    "1f1b-shared": {**PIPE, "shared": True},
    "tp": {"tp": 2},
    "tp-sequence": {"tp": 2, "sequence_parallel": True},
    "tp-untied-grouped": {"tp": 2, "tied": False, "kv_heads": 2},
    "cp": {"cp": 2},
    "cp-grouped": {"cp": 2, "kv_heads": 2},
    "gpipe": {**PIPE, "schedule": "gpipe"},
    "gpipe-breadth-first": {**PIPE, "schedule": "gpipe", "stages_per_rank": 2},
    "1f1b": PIPE,
    "1f1b-measured": {**PIPE, "balance": "measured"},
    "1f1b-checkpointing": {**PIPE, "activation_checkpointing": True},
    "interleaved": INTERLEAVED,
    "zero-bubble": ZERO_BUBBLE,
    "zero-bubble-interleaved-untied": {**ZERO_BUBBLE, "stages_per_rank": 2, "tied": False},
}

FOUR: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero2-hybrid": {"zero": 2, "shard": 2},
    "zero3-hybrid": {"zero": 3, "shard": 2},
    "dp-tp": {"tp": 2},
    "dp-tp-zero1": {"tp": 2, "zero": 1},
    "dp-tp-zero2": {"tp": 2, "zero": 2},
    "dp-tp-zero3-sequence": {"tp": 2, "zero": 3, "sequence_parallel": True},
    "dp-pp": PIPE,
    "dp-pp-zero1-zero-bubble": {**ZERO_BUBBLE, "zero": 1},
    "dp-pp-zero2": {**PIPE, "zero": 2},
    "dp-pp-zero2-zero-bubble": {**ZERO_BUBBLE, "zero": 2, "stages_per_rank": 2},
    "dp-pp-zero2-shared": {**INTERLEAVED, "zero": 2, "shared": True},
    "dp-pp-zero3": {**PIPE, "zero": 3},
    "dp-pp-zero3-interleaved": {**INTERLEAVED, "zero": 3},
    "pp-tp": {**PIPE, "tp": 2},
    "pp-tp-zero-bubble": {**ZERO_BUBBLE, "tp": 2},
    "pp-tp-sequence-interleaved": {**INTERLEAVED, "tp": 2, "sequence_parallel": True},
    "dp-cp": {"cp": 2},
    "dp-cp-codec": {"cp": 2, **ALL_OF_IT},
    "dp-cp-zero1": {"cp": 2, "zero": 1},
    "dp-cp-zero3": {"cp": 2, "zero": 3},
    "cp-tp": {"cp": 2, "tp": 2},
    "cp-pp": {**PIPE, "cp": 2},
    "pp4": {"pp": 4, "micro_batches": 2},
    "tp4": {"tp": 4},
}

EIGHT: dict[str, dict[str, Any]] = {
    "dp-pp-tp": {**PIPE, "tp": 2},
    "dp-pp-tp-zero1-zero-bubble": {**ZERO_BUBBLE, "tp": 2, "zero": 1},
    "dp-pp-tp-zero2-interleaved": {**INTERLEAVED, "tp": 2, "zero": 2},
    "dp-pp-tp-zero3-sequence": {**PIPE, "tp": 2, "zero": 3, "sequence_parallel": True},
    "dp-tp-zero2-hybrid": {"tp": 2, "zero": 2, "shard": 2},
    "dp-pp-zero3-hybrid": {**PIPE, "zero": 3, "shard": 2},
    "dp-cp-tp-zero3": {"cp": 2, "tp": 2, "zero": 3},
    "dp-cp-pp-zero2": {**PIPE, "cp": 2, "zero": 2},
    "cp-pp-tp": {**PIPE, "cp": 2, "tp": 2},
}

HOROVOD: dict[str, dict[str, Any]] = {
    "horovod": {"engine": "horovod"},
    "horovod-codec": {"engine": "horovod", "bucket_bytes": 20_000, **ALL_OF_IT},
    "horovod-zero1-lamb": {"engine": "horovod", "zero": 1, "optimizer": "lamb"},
    "horovod-zero1": {"engine": "horovod", "zero": 1, "bucket_bytes": 20_000},
}

# Of four and eight ranks these run in `make test`, the others in `make test-slow`: each axis, each level of ZeRO, and
# each pair of axes that has code of its own. Three axes at once are composed of what their pairs are.
COVERING = {
    "four": {"zero3-hybrid", "dp-tp", "dp-tp-zero2", "dp-pp", "dp-pp-zero1-zero-bubble", "dp-pp-zero2-shared"}
    | {"dp-pp-zero3", "pp-tp-sequence-interleaved", "dp-cp-codec", "dp-cp-zero3", "pp4"},
    "eight": set[str](),
}


def launches() -> dict[str, tuple[int, dict[str, dict[str, Any]]]]:
    """World size and layouts by launch; those of "four, rest" and "eight, rest" are not in COVERING."""
    found = {}
    for name, world, cases in (("two", 2, TWO), ("four", 4, FOUR), ("eight", 8, EIGHT), ("horovod", 3, HOROVOD)):
        here = {layout: case for layout, case in cases.items() if runs_here(case, world)}
        chosen = COVERING.get(name, here.keys())
        found[name] = world, {layout: case for layout, case in here.items() if layout in chosen}
        if name in COVERING:
            found[f"{name}, rest"] = world, {layout: case for layout, case in here.items() if layout not in chosen}
    return {name: launch for name, launch in found.items() if launch[1]}


BY_LAUNCH = launches()
