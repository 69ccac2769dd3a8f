"""Fit one library with its defaults on the rows that benchmarks/arena.py has written, and predict its test rows.

    python benchmarks/arena_peer.py catboost FOLDER SEED

Run by the environment of the peers (`make arena`), which has nothing of this project. FOLDER/rows.npz: `train` and
`test` (rows, columns) float32, NaN where a value is missing, codes of categories; `labels` of the training rows;
`coded`, which columns are categories; `task`. Writes FOLDER/<library>.npz: `predictions`, and CPU `seconds` of
fit and predict.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd


def frame(values: np.ndarray, coded: np.ndarray, missing: int | None = None) -> pd.DataFrame:
    """The columns under names; a category is of type category, or, where `missing` is a code, a whole number."""
    columns: dict[str, Any] = {f"c{n}": values[:, n] for n in range(values.shape[1])}
    for n in np.flatnonzero(coded):
        codes = np.where(np.isnan(values[:, n]), -1 if missing is None else missing, values[:, n]).astype(np.int64)
        known = np.unique(codes[codes >= 0])
        columns[f"c{n}"] = pd.Categorical(codes, known) if missing is None else codes
    return pd.DataFrame(columns)


def fitted(library: str, is_value: bool, seed: int, train: np.ndarray, labels: np.ndarray, coded: np.ndarray) -> Any:
    """A model of the library, and what makes its rows of a matrix."""
    if library == "catboost":
        from catboost import CatBoostClassifier, CatBoostRegressor

        kind = CatBoostRegressor if is_value else CatBoostClassifier
        model = kind(
            random_seed=seed, verbose=False, cat_features=np.flatnonzero(coded).tolist(), allow_writing_files=False
        )
        return model.fit(frame(train, coded, -1), labels), lambda rows: frame(rows, coded, -1)
    both = frame(train, coded)
    types = both.dtypes

    def typed(rows: np.ndarray) -> pd.DataFrame:
        return frame(rows, coded).astype(types)

    if library == "lightgbm":
        from lightgbm import LGBMClassifier, LGBMRegressor

        return (LGBMRegressor if is_value else LGBMClassifier)(random_state=seed, verbose=-1).fit(both, labels), typed
    if library == "xgboost":
        from xgboost import XGBClassifier, XGBRegressor

        kind = XGBRegressor if is_value else XGBClassifier
        return kind(random_state=seed, enable_categorical=True).fit(both, labels), typed
    from pytabkit import RealMLP_TD_Classifier, RealMLP_TD_Regressor, TabM_D_Classifier, TabM_D_Regressor

    kinds = {"realmlp": (RealMLP_TD_Classifier, RealMLP_TD_Regressor), "tabm": (TabM_D_Classifier, TabM_D_Regressor)}
    return kinds[library][is_value](random_state=seed, device="cpu", verbosity=0).fit(both, labels), typed


def main() -> None:
    library, folder, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    rows = np.load(folder / "rows.npz")
    is_value = str(rows["task"]) == "value"
    labels = rows["labels"] if is_value else rows["labels"].astype(np.int64)
    began = time.process_time()
    model, typed = fitted(library, is_value, seed, rows["train"], labels, rows["coded"])
    found = model.predict(typed(rows["test"])) if is_value else model.predict_proba(typed(rows["test"]))
    np.savez(folder / f"{library}.npz", predictions=found, seconds=time.process_time() - began)


if __name__ == "__main__":
    main()
