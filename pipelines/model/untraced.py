"""Search the layouts of a model that cannot be traced, by what is known without its activations and seconds."""

from __future__ import annotations

import json
from typing import Any

from sparkring.conf.clusters.cluster import GIB, Cluster
from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.plain_text import count_of
from sparkring.pipelines.model.layouts import cluster_facts, cut_words, missing_room, model_facts
from sparkring.pipelines.model.plan import plan_workload
from sparkring.pipelines.model.sizes import size_text
from sparkring.training.parallel.mesh import AXES, Mesh
from sparkring.training.planner.search import AskedLayout, LayoutCosts, StateLayout, state_layouts

SHOWN = 10


class StateSearch:
    """The layouts of a recipe on a cluster, with the memory of weights, gradients and optimizer, and the bytes sent."""

    def __init__(
        self, config: RunConfig, name: str, cluster: Cluster, manifest: DatasetManifest | None, devices: int
    ) -> None:
        """Search layouts without a trace. ManifestError if the model needs a missing dataset.

        Args:
            config: resolved configuration of the run.
            name: name of the cluster.
            cluster: machines of the cluster.
            manifest: manifest of the recipe's dataset.
            devices: number of requested devices.
        """
        self.config, self.name, self.cluster, self.devices = config, name, cluster, devices
        self.workload = plan_workload(config, manifest, Mesh(dp=config.launch.world), "torch")
        self.costs = LayoutCosts.without_trace(self.workload, cluster)
        self.layouts = state_layouts(self.costs, devices)
        self.fitting = [layout for layout in self.layouts if self.costs.fits(layout)]

    def as_json(self, why: str, asked: AskedLayout | None) -> str:
        """Return the layouts that fit, for `--json`. `why`: why the model cannot be traced."""
        found = {
            "cluster": cluster_facts(self.name, self.cluster, self.devices),
            "model": model_facts(self.config, self.workload),
            "tried": {
                "layouts": len(self.layouts),
                "fit": len(self.fitting),
                "limit_gib": round(self.costs.limit / GIB, 4),
            },
            "layouts": [state_facts(layout) for layout in self.fitting[:SHOWN]],
            "why": {
                "asked": asked is not None,
                "reasons": [why] if asked is None else self.about(asked).splitlines(),
            },
        }
        return json.dumps(found, indent=1)

    def report(self, why: str) -> str:
        """Report the layouts that fit, and what is missing. `why`: why the model cannot be traced."""
        head = (
            f"{self.config.name} on {self.devices} x {self.cluster.device.name}: activations, the loss and seconds "
            f"are not planned: {why}\n\n{len(self.fitting):,} of {count_of(len(self.layouts), 'layout', ',')} that can "
            f"run hold weights, gradients and optimizer state in {size_text(self.costs.limit)}, without activations; "
            "those that send least come first:"
        )
        lines = [state_line(layout) for layout in self.fitting[:SHOWN]]
        return "\n".join([head, *(lines or [self._missing()])])

    def about(self, asked: AskedLayout) -> str:
        """Describe where the requested layouts rank, or why they are impossible."""
        lines = []
        for layout in self.layouts:
            if layout.mesh == asked.mesh and asked.includes(layout.config):
                lines.append("; ".join([state_line(layout), *missing_room(self.costs, layout)]))
        problems = self.costs.mesh_problems(self.config.parallel, asked.mesh)
        return "\n".join(lines or problems or ["no layout of these ranks can run so"])

    def _missing(self) -> str:
        least = min(self.layouts, key=lambda each: each.memory, default=None)
        need = "" if least is None else f"; the smallest, {state_line(least)}"
        return f"none{need}; take more devices, or ones with more memory"


def state_line(layout: StateLayout) -> str:
    """Describe a layout with its memory and what it sends."""
    offloaded = f" and {size_text(layout.host)} of the host" if layout.host else ""
    held = f"{size_text(layout.memory)}{offloaded}"
    return f"{cut_words(layout.config, layout.mesh)}: {held}, sends {size_text(layout.sent)} a step"


def state_facts(layout: StateLayout) -> dict[str, Any]:
    """Return a layout for `--json`."""
    config = layout.config
    axes = {axis: getattr(layout.mesh, axis) for axis in AXES}
    return {
        "layout": axes | config.model_dump(include={"zero", "shard", "offload", "precision"}),
        "state_bytes": layout.memory,
        "host_bytes": layout.host,
        "sent_bytes": layout.sent,
        "step_s": None,
    }
