"""The recipe's `report` block: what the report shows, and what the model must beat."""

from typing import Annotated, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from sparkring.conf.schema import NonNegativeFloat, Strict


class AlsConfig(Strict):
    """Settings of Spark's ALS for implicit feedback; the positive training rows are what it is fitted on."""

    rank: PositiveInt = Field(16, description="numbers of each vector: rank")
    iterations: PositiveInt = Field(10, description="maxIter")
    reg: NonNegativeFloat = Field(0.1, description="regParam, times the number of rows of the list or item")
    alpha: PositiveFloat = Field(1.0, description="how much more certain a positive row is than a pair without one")


class RankingConfig(Strict):
    """Test rows as lists that the predictions order, one for each value of a column, such as a user. Of a binary task.

    A list's rows of label 1 should come first: recall and NDCG at each `k`, means over the lists that have such a row.
    """

    group: str = Field(description="stored scalar column of the dataset, such as a user; its test rows are one list")
    item: str | None = Field(
        None,
        description="stored scalar column of what is ranked, such as a product. With report.baselines the positive "
        "training rows of its values are counted: the baseline `popularity`; None: there is no such baseline",
    )
    als: AlsConfig | None = Field(
        None,
        description="also fit Spark's ALS on who of `group` took which `item` in training: a baseline; {}: defaults",
    )
    k: Annotated[list[PositiveInt], Field(min_length=1)] = Field(
        [10], description="how many of a list's first rows are looked at: scores are recall_at_10 and ndcg_at_10"
    )

    @model_validator(mode="after")
    def _als_has_items(self) -> Self:
        if self.als is not None and self.item is None:
            raise ValueError("als: factorizes who took which item; name the column of what is ranked in `item`")
        return self

    @property
    def metrics(self) -> list[str]:
        """Names of the scores."""
        return [f"{name}_at_{k}" for k in self.k for name in ("recall", "ndcg")]


class ReportConfig(Strict):
    """What the report shows, and what a model must beat."""

    share_by: list[str] = Field(
        [], description="stored scalar columns of the dataset by which the report shows the positive share"
    )
    groups: list[str] = Field(
        [],
        description="stored scalar columns of the dataset by whose values the test scores are also given, such as "
        "[carrier]: of the 10 values with most rows, and of the others together",
    )
    min_group_rows: PositiveInt = Field(100, description="test rows that a value must have to be scored by itself")
    ranking: RankingConfig | None = None
    baselines: bool = Field(
        True,
        description="also fit a constant guess (binary: the majority rate; multiclass: the classes' rates; multilabel: "
        "each label's rate; regression: the mean) and, where there are scalar features, a linear model (logistic, "
        "multinomial, one logistic per label, linear regression) and gradient-boosted trees on the same rows; one that "
        "fails is a warning",
    )
    importance: bool = Field(
        True,
        description="also measure by how much the loss of a sample of test rows grows where a column's values are "
        "those of other rows, for each column that a table's model reads",
    )
    must_beat: list[str] = Field(
        [],
        description="test metrics in which the model must beat every baseline that has them, but trees; else, and "
        "where a baseline cannot be computed, it is registered without tracking.alias and the job's exit code is 6",
    )
    must_beat_trees: list[str] = Field(
        [], description="as must_beat, for the baseline of gradient-boosted trees, which is the hardest to beat"
    )
    must_beat_guess: bool = Field(
        True,
        description="also certainly beat the constant guess: the loss of a table's model on the test rows is less by "
        "more than the 95 % interval of the difference, which is wide where these are few; false: a person has decided "
        "to promote without",
    )
    sample_prompt: str = Field("", description="language_model: text the sample in the report begins with")
    sample_tokens: PositiveInt = Field(200, description="language_model: length of the sample in the report")

    @property
    def columns(self) -> dict[str, list[str]]:
        """Key -> the columns of the dataset that it names."""
        lists = self.ranking
        named = {} if lists is None else {"report.ranking.group": lists.group, "report.ranking.item": lists.item}
        several = {"report.share_by": self.share_by, "report.groups": self.groups}
        return several | {key: [name] for key, name in named.items() if name is not None}
