"""What tables and figures call a method and the conditions of a record. Applied when they are rendered: data is
selected, joined and grouped by method and setting, never by these words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pandas as pd

from nestpipe.measurement.record import Record

#: Methods in the order of the tables, and what each is called. serial is what the paper's numbers call TorchRec.
LABELS: Mapping[str, str] = {
    "serial": "TorchRec (serial)",
    "torchrec": "real torchrec",
    "torchrec-dedup": "real torchrec, index dedup",
    "torchrec-planner": "real torchrec, planner",
    "torchrec-bf16": "real torchrec, bf16",
    "2d-sp": "2D-SP",
    "uniemb": "UniEmb",
    "dbp-only": "DBP-only",
    "fwp-only": "FWP-only",
    "nestpipe": "NestPipe",
    "nestpipe+bf16": "NestPipe, bf16",
    "nestpipe+2d-sp": "NestPipe+2D-SP",
    "nestpipe+2d-sp-exact": "NestPipe+2D-SP, exact",
}
_ORDER = {method: i for i, method in enumerate(LABELS)}
#: The paper's name of a method -> the method.
PAPER_METHODS: Mapping[str, str] = {
    "TorchRec": "serial",
    "2D-SP": "2d-sp",
    "UniEmb": "uniemb",
    "DBP-only": "dbp-only",
    "FWP-only": "fwp-only",
    "NestPipe": "nestpipe",
    "NestPipe+2D-SP": "nestpipe+2d-sp",
}


class Variant(NamedTuple):
    """What has a row of its own in a table. ``clustered``: samples that share keys share a micro-batch."""

    method: str
    clustered: bool = False


def variant_of(record: Record) -> Variant:
    return Variant(record.method, is_clustered(record))


def is_clustered(record: Record) -> bool:
    """The record is measured, and samples that share keys were put together."""
    return record.kind == "measured" and bool(record.config.get("clustering")) and record.config["micro_batches"] > 1


def without_count(method: str) -> str:
    """The method's name without a fixed number of micro-batches: ``nestpipe(4)`` -> ``nestpipe``."""
    return method.partition("(")[0]


def label_of(variant: Variant) -> str:
    """What the variant's row is called."""
    plain = without_count(variant.method)
    label = LABELS.get(plain, plain)
    if variant.method != plain:
        label = variant.method if plain == "serial" else f"{label}{variant.method.removeprefix(plain)}"
    return f"{label} + clustering" if variant.clustered else label


def order_of(variant: Variant) -> tuple[int, str]:
    """Sort key: rows in the order of the paper, further methods after them."""
    return _ORDER.get(without_count(variant.method), len(_ORDER)), label_of(variant)


def variants(frame: pd.DataFrame) -> list[Variant]:
    """The variant of each row, by the columns ``method`` and ``clustered``."""
    return [
        Variant(method, bool(clustered)) for method, clustered in zip(frame["method"], frame["clustered"], strict=True)
    ]


def in_order(found: Iterable[Variant]) -> list[Variant]:
    """Each variant once, in the order of the tables."""
    return sorted(set(found), key=order_of)


def labelled(frame: pd.DataFrame) -> pd.DataFrame:
    """``frame`` with a column ``label``."""
    return frame.assign(label=[label_of(variant) for variant in variants(frame)])


def only(frame: pd.DataFrame, method: str, clustered: bool = False) -> pd.DataFrame:
    """The rows of one variant."""
    if frame.empty:
        return frame
    return frame[(frame["method"] == method) & (frame["clustered"] == clustered)]


def conditions_of(record: Record) -> str:
    """The record's conditions in a few words, for a column's heading."""
    if record.kind == "simulated":
        return f"{record.config['hardware']}, {record.workers} workers"
    return f"{record.workers} {family_conditions_of(record)}"


def family_conditions_of(record: Record) -> str:
    """The conditions of a measured record but for the number of workers, in a few words."""
    where = record.testbed
    if where.startswith("netns:"):
        where = "hosts at " + where.removeprefix("netns:").replace("mbit", " Mbit/s").replace(",", " + ")
        where = where.replace("gbit", " Gbit/s").replace("1ms", "1 ms")
    else:
        where = f"ranks on {where}"
    return f"{where}, dense PACED to {_pace(record)}" if record.paced else f"{where}, unpaced"


def pace_of(record: Record) -> str:
    """Whether dense compute was paced, and to what, in a few words."""
    return f"paced to {_pace(record)}" if record.paced else "unpaced"


def _pace(record: Record) -> str:
    return f"{record.config.get('pace_dense') or 0:g} ms"
