"""The recipe's `trees` block: gradient-boosted trees, trained where `model.family` is trees or both."""

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from sparkring.conf.schema import NonNegativeFloat, Strict

Share = Annotated[float, Field(gt=0, le=1)]


class TreesConfig(Strict):
    """Gradient-boosted trees of XGBoost, by histograms (docs/how-to/trees.md).

    A round adds a tree, or one for each class or label. It is a step wherever steps are counted: in checkpoints,
    metrics and `train.export`.
    """

    rounds: PositiveInt = Field(5000, description="most rounds; early stopping usually ends training long before")
    early_stopping_rounds: PositiveInt | None = Field(
        50,
        description="rounds without a better train.best_metric before training stops, and the best ones become the "
        "model; None: all rounds are made, and train.export decides",
    )
    refit: bool = Field(
        False,
        description="when the number of rounds is known, so many are grown anew on the training and validation rows "
        "together, and these trees are the model; what validation rows say is of the trees without them",
    )
    learning_rate: Share = Field(0.05, description="share of each tree's values that is added; lower needs more rounds")
    max_depth: PositiveInt = Field(6, description="splits between a tree's root and a leaf, at most")
    rows_per_leaf: NonNegativeFloat | None = Field(
        None,
        description="least rows in a leaf; a row counts by its weight and by how uncertain the trees so far are of it, "
        "relative to the mean row; None: 5 of regression and poisson, 30 of other tasks",
    )
    subsample: Share = Field(0.8, description="share of the rows that each tree is grown on")
    columns_per_tree: Share = Field(
        0.8, description="share of the columns that each round's trees may split, rounded up"
    )
    l2: NonNegativeFloat = Field(1.0, description="penalty of the square of leaf values")
    min_gain: NonNegativeFloat = Field(0.0, description="least gain of a split")
    max_bin: Annotated[int, Field(ge=2, le=65535)] = Field(
        256, description="intervals that a column's numbers are cut into"
    )
    categories_per_split: PositiveInt = Field(
        4,
        description="categories that a split may part from the others of a categorical column, at most; more fit small "
        "tables too closely",
    )
    memory_share: PositiveFloat = Field(
        0.5,
        description="share of a rank's part of its host's memory that training rows may take; with more, they are kept "
        "in pages on the local disk, which is slower",
    )
