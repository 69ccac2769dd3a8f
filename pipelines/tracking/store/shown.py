"""What MLflow's pages show of runs and experiments, written: names, descriptions, saved views. Used by the sink."""

from __future__ import annotations

from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.entities.model_registry import ModelVersion

from sparkring.conf.plain_text import for_terminal, in_markdown
from sparkring.pipelines.tracking import ops
from sparkring.pipelines.tracking.describe import (
    FAILED,
    VERSION,
    changes,
    main_scores,
    reason_line,
    version_link,
    with_card,
    with_headline,
    without_headline,
)
from sparkring.pipelines.tracking.tags import DATE, ERROR, RECIPE
from sparkring.pipelines.tracking.views import (
    NOTE,
    has_links,
    links,
    noted,
    runs_page,
    runs_view,
    undated_links,
    view_tags,
)

LONGEST_ERROR = 500  # characters of why a run failed


class Shown:
    """The texts of one experiment. model: registered name of its recipes; None: each recipe's own."""

    def __init__(self, client: MlflowClient, experiment: str, model: str | None) -> None:
        self.client, self.experiment, self.model = client, experiment, model

    def failure(self, run: str, error: str) -> None:
        """Show why a run failed, in a tag and in the first line of its description."""
        why = for_terminal(reason_line(error))[:LONGEST_ERROR]
        note = self.client.get_run(run).data.tags.get(NOTE, "")
        self.client.set_tag(run, NOTE, with_headline(note, FAILED + in_markdown(why), FAILED))
        self.client.set_tag(run, ERROR, why)

    def forget_failure(self, run: str) -> None:
        """Remove the tags that `failure` set, of a run that continues."""
        tags = self.client.get_run(run).data.tags
        if ERROR in tags:
            self.client.set_tag(run, NOTE, without_headline(tags.get(NOTE, ""), FAILED))
            self.client.delete_tag(run, ERROR)

    def link(self, recipe: str) -> None:
        """Add links to the recipe's pages to the experiment's description, unless it has some."""
        note = self.client.get_experiment(self.experiment).tags.get(NOTE, "")
        if not has_links(note, recipe):
            pages = {"runs": runs_page(self.experiment)}
            self.client.set_experiment_tag(self.experiment, NOTE, noted(note, recipe, pages))

    def runs(self, run: Run, op: ops.Model) -> None:
        """Save the view of a recipe without dates, with links, once its first scores are known."""
        client, tags = self.client, run.data.tags
        if RECIPE not in tags or DATE in tags:
            return
        experiment, recipe = client.get_experiment(self.experiment), tags[RECIPE]
        name, view = runs_view(recipe, op.scores, int(experiment.creation_time or 0))
        if name not in experiment.tags:
            client.set_experiment_tag(self.experiment, name, view)
            pages = undated_links(recipe, self.experiment, op.registered_model or recipe)
            note = noted(experiment.tags.get(NOTE, ""), recipe, pages)
            client.set_experiment_tag(self.experiment, NOTE, note)

    def name_by_changes(self, run: Run, params: ops.Texts) -> None:
        """Add to a job's name what differs from the recipe's job before it, once."""
        client, recipe = self.client, run.data.tags[RECIPE]
        before = f"tags.`{RECIPE}` = '{recipe}' and attributes.start_time < {run.info.start_time}"
        found = client.search_runs([self.experiment], before, max_results=1, order_by=["attributes.start_time DESC"])
        changed = changes(params, found[0].data.params) if found and found[0].data.params else ""
        if changed and not str(run.info.run_name).endswith(changed):
            client.set_tag(run.info.run_id, "mlflow.runName", f"{run.info.run_name} {changed}")

    def dates(self, op: ops.History) -> None:
        """Save the views of the recipe's dates in the experiment, and links to them; what a user changed stays."""
        client = self.client
        experiment = client.get_experiment(self.experiment)
        model = self.model or op.recipe
        wanted = view_tags(op.recipe, op.values, int(experiment.creation_time or 0))
        note = experiment.tags.get(NOTE, "")
        missing = {name: value for name, value in wanted.items() if name not in experiment.tags}
        if (with_links := noted(note, op.recipe, links(op.recipe, self.experiment, model))) != note:
            missing[NOTE] = with_links
        for name, value in missing.items():
            client.set_experiment_tag(self.experiment, name, value)

    def card(self, run: str, op: ops.Model, version: ModelVersion) -> None:
        """Write the model card into the version, unless it has a description, and into the run below its version."""
        number = str(version.version)
        card, link = op.card.replace(VERSION, number), version_link(version.name, number)
        if not version.description:
            self.client.update_model_version(version.name, number, card)
        note = with_card(self.client.get_run(run).data.tags.get(NOTE, ""), card)
        self.client.set_tag(run, NOTE, with_headline(note, link + main_scores(op.scores), link))
