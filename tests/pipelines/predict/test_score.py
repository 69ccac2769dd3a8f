"""How predictions are written."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from sparkring.pipelines.predict.score import _flush


def test_texts_alone_are_written_with_a_dictionary() -> None:
    sink = pa.BufferOutputStream()
    made = pa.table({"carrier": ["UA", "AA"] * 50, "prediction": [n / 100 for n in range(100)]})
    waiting = [made.slice(0, 40), made.slice(40)]
    _flush(None, sink, waiting).close()
    file = pq.ParquetFile(pa.BufferReader(sink.getvalue()))
    assert file.read().equals(made) and waiting == []
    columns = [file.metadata.row_group(0).column(n) for n in (0, 1)]
    assert [column.dictionary_page_offset is not None for column in columns] == [True, False]
