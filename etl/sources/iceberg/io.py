"""How files of an Iceberg table are opened: by the reader's properties alone, metadata whole and within a bound."""

from __future__ import annotations

import io
import zlib
from typing import Any
from urllib.parse import urlsplit

from pyiceberg.catalog import Catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.io import PY_IO_IMPL, FileIO, InputFile, load_file_io
from pyiceberg.typedef import EMPTY_DICT, Identifier, Properties
from pyiceberg.utils.config import Config

from sparkring.etl.sources.iceberg.avro import MOST_BYTES, check_avro
from sparkring.etl.sources.iceberg.places import METADATA

OWN_IMPL = "sparkring.py-io-impl"  # the class that the reader's configuration names, if any
KEPT_BYTES = 64 << 20  # of metadata of one table
MOST_VALUES = 2_000_000  # of a table's metadata file: about 80,000 snapshots, and 1 GB as pyiceberg holds them
GZIPPED = f".gz{METADATA}"


class TableIO(FileIO):
    """Opens files by the properties of the reader and of the catalog: a table names no class, server or credential."""

    def __init__(self, properties: Properties = EMPTY_DICT) -> None:
        super().__init__({name: value for name, value in properties.items() if name != PY_IO_IMPL})
        self._by_scheme: dict[str, FileIO] = {}

    def new_input(self, location: str) -> InputFile:
        scheme = urlsplit(location).scheme
        if scheme not in self._by_scheme:
            chosen = {PY_IO_IMPL: self.properties[OWN_IMPL]} if self.properties.get(OWN_IMPL) else {}
            self._by_scheme[scheme] = load_file_io({**self.properties, **chosen}, location)
        return self._by_scheme[scheme].new_input(location)

    def new_output(self, location: str) -> Any:
        raise NotImplementedError("tables are read only")

    def delete(self, location: Any) -> None:
        raise NotImplementedError("tables are read only")


class MetadataIO(TableIO):
    """Opens metadata, manifest lists and manifests: each is read whole and checked before pyiceberg parses it."""

    def __init__(self, properties: Properties = EMPTY_DICT) -> None:
        super().__init__(properties)
        self.of_data = TableIO(self.properties)
        self._kept: dict[str, bytes] = {}  # a window plans each of its intervals by the same files

    def new_input(self, location: str) -> InputFile:
        return _Checked(super().new_input(location), self._kept)


class _Checked(InputFile):
    """A file of metadata, decompressed. `open` raises ValueError for one that is damaged or too large."""

    def __init__(self, under: InputFile, kept: dict[str, bytes]) -> None:
        # pyiceberg would decompress a file with the other name, without a bound.
        super().__init__(under.location.removesuffix(GZIPPED) + METADATA * under.location.endswith(GZIPPED))
        self._under, self._kept = under, kept

    def __len__(self) -> int:
        return len(self._under)

    def exists(self) -> bool:
        return self._under.exists()

    def open(self, seekable: bool = True) -> Any:
        if self._under.location in self._kept:
            return io.BytesIO(self._kept[self._under.location])
        with self._under.open() as stream:
            data = stream.read(MOST_BYTES + 1)
        try:
            if self._under.location.endswith(GZIPPED):
                unpacker = zlib.decompressobj(wbits=31)
                data = unpacker.decompress(data, MOST_BYTES + 1)
            if len(data) > MOST_BYTES:
                raise ValueError(f"has more than {MOST_BYTES} bytes")
            if not self.location.endswith(METADATA):
                check_avro(data)
            elif sum(map(data.count, (b",", b"[", b"{"))) > MOST_VALUES:
                raise ValueError(f"holds more than {MOST_VALUES} values")
        except Exception as error:
            raise ValueError(f"{self._under.location}: {error}") from error
        if sum(map(len, [*self._kept.values()])) + len(data) <= KEPT_BYTES:
            self._kept[self._under.location] = data
        return io.BytesIO(data)


def with_own_io(catalog: Catalog) -> Catalog:
    """Make a catalog open its tables by our IO: neither a table nor the catalog's server names a class of it."""
    configured = (Config().get_catalog_config(catalog.name) or {}).get(PY_IO_IMPL, "")
    own = {PY_IO_IMPL: f"{MetadataIO.__module__}.{MetadataIO.__name__}", OWN_IMPL: str(configured)}
    catalog.properties = {**catalog.properties, **own}
    keep = isinstance(catalog, RestCatalog)  # it gives credentials for a table with its answer

    def load_io(properties: Properties = EMPTY_DICT, location: str | None = None) -> FileIO:
        return MetadataIO({**catalog.properties, **(properties if keep else {}), **own})

    def to_table(identifier: Identifier, response: Any) -> Any:
        bare = response.metadata.model_copy(update={"properties": {}})
        table = type(catalog)._response_to_table(catalog, identifier, response.model_copy(update={"metadata": bare}))
        table.metadata = response.metadata
        return table

    # TRICK: pyiceberg 0.12 has no other place to keep a table's properties out of its IO (tests: one for each door).
    catalog._load_file_io = load_io
    if keep:
        catalog._response_to_table = to_table
    return catalog
