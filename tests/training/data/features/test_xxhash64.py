import numpy as np
import pyarrow as pa
import pytest

from sparkring.training.data.features.transform import apply_numpy, make_transforms
from sparkring.training.data.features.xxhash64 import NULL_ID, hash_bytes, hash_whole


def hashed(texts: list[bytes]) -> list[int]:
    offsets = np.cumsum([0, *(len(text) for text in texts)])
    return hash_bytes(offsets, np.frombuffer(b"".join(texts), np.uint8)).tolist()


def test_hashes_are_those_that_spark_prints() -> None:
    # https://spark.apache.org/docs/latest/api/python/reference/pyspark.sql/api/pyspark.sql.functions.xxhash64.html
    assert hashed([b"ABC"]) == [4105715581806190027]
    assert hash_whole(np.array([1])).tolist() == [-7001672635703045582]


def test_hashes_of_every_length_are_those_of_spark() -> None:
    texts = ["".join(chr(97 + (7 * i + length) % 26) for i in range(length)).encode() for length in range(72)]
    hashes = hashed(texts)
    assert (hashes[4], hashes[12]) == (8532139113478182624, 4870540731854627971)
    assert sum(hashes) % 2**64 == 6222432616743301710  # of Spark 4.3.0's xxhash64 of the same strings


def test_whole_numbers_are_hashed_as_their_eight_bytes() -> None:
    numbers = [0, 1, -1, 2**63 - 1, -(2**63), 12345678901]
    texts = [number.to_bytes(8, "little", signed=True) for number in numbers]
    assert hash_whole(np.array(numbers)).tolist() == hashed(texts)
    assert hash_whole(np.array([7], np.int8)).tolist() == hash_whole(np.array([7])).tolist()


def test_a_hash_does_not_depend_on_its_neighbors() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.bytes(size) for size in [*range(140), 0, 500]]
    together = hashed(texts)
    assert together == [hashed([text])[0] for text in texts] and len(set(together)) == 141
    assert together[::-1] == hashed(texts[::-1])


TEXTS = ["", "UA", "Ünï", "a" * 40, None, "UA"]
NUMBERS = [7, None, -1, 2**63 - 1, 7]


def features(spark_type: str) -> dict[str, object]:
    return {"version": 1, "inputs": {"c": spark_type}, "features": [{"name": "id", "kind": "hashed", "column": "c"}]}


@pytest.mark.parametrize(
    ("spark_type", "values", "stored"), [("string", TEXTS, pa.string()), ("bigint", NUMBERS, pa.int64())]
)
def test_a_reader_and_serving_make_the_same_ids(spark_type: str, values: list[object], stored: pa.DataType) -> None:
    state = features(spark_type)
    (transform,) = make_transforms(state)
    array = pa.array(values, stored)
    served = apply_numpy(state, {"c": values})["id"]
    assert served.dtype == np.int64 and served[values.index(None)] == NULL_ID == 42
    tables = [pa.chunked_array([array[:2], array[2:]])]
    if spark_type == "string":  # as the reader has it of Parquet
        tables.append(pa.chunked_array([array[:2].dictionary_encode(), array[2:].dictionary_encode()]))
    for made in (*map(transform.of_stored, tables), apply_numpy(state, {"c": array})):
        assert made["id"].dtype == np.int64 and made["id"].tolist() == served.tolist()
    assert (served == served[-1]).sum() == 2


def test_a_number_has_one_id_however_it_is_given() -> None:
    state = features("smallint")
    given = [[7, 8], [7.0, 8.0], np.array([7, 8], np.int64), pa.array(["7", "8"]), pa.array([7, 8], pa.int8())]
    ids = {tuple(apply_numpy(state, {"c": values})["id"].tolist()) for values in given}
    assert ids == {tuple(hash_whole(np.array([7, 8])).tolist())}


def test_no_rows_have_no_ids() -> None:
    for spark_type in ("string", "int"):
        (transform,) = make_transforms(features(spark_type))
        kind = pa.string() if spark_type == "string" else pa.int32()
        assert transform.of_stored(pa.chunked_array([], kind))["id"].tolist() == []
        assert apply_numpy(features(spark_type), {"c": []})["id"].tolist() == []
