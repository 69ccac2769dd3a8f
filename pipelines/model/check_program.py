"""Load a registered model in its own environment and predict its sample: what `sparkring serve-check` starts.

It runs by its file, where sparkring is not installed, and prints one JSON object: `Answer` of check.py. The sample is
predicted from a pandas frame, as `load_model` and `spark_udf` get rows, and from JSON, as `mlflow models serve` does.
"""

from __future__ import annotations

import base64
import datetime
import json
import sys
from pathlib import Path
from typing import Any


def main(model: Path, rows: Path) -> dict[str, Any]:
    """Predict the rows in a Parquet file with the MLflow model in a folder."""
    import mlflow.pyfunc
    import pyarrow.parquet as pq
    from mlflow.pyfunc.scoring_server import invocations

    served = mlflow.pyfunc.load_model(str(model))
    import sparkring  # the checkout's, which the model's code must not take the place of

    answers: dict[str, Any] = {}
    if rows.exists():
        frame = pq.read_table(rows).to_pandas(integer_object_nulls=True)
        answers["pandas"] = served.predict(frame).to_dict("list")
        request = json.dumps({"dataframe_split": {"columns": list(frame), "data": as_json(frame.to_numpy(object))}})
        response = invocations(request, "application/json", served, served.metadata.get_input_schema())
        if response.status != 200:
            raise ValueError(f"JSON rows are refused: {response.response}")
        found = json.loads(response.response)["predictions"]
        answers["json"] = {name: [row[name] for row in found] for name in (found[0] if found else {})}
    return {"code": str(Path(sparkring.__file__).resolve().parent), "predictions": answers}


def as_json(value: Any) -> Any:
    """Convert a value to JSON: dates as text, bytes in base64, NaN as null, arrays as lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return [as_json(each) for each in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.date):
        return None if value != value else str(value)
    return None if value is None or value != value else value


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))
