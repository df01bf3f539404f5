"""Random cases: a model, its batches and its loop, all a function of one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

DIM, ROWS = 4, 17


@dataclass(frozen=True)
class Lookup:
    """One call of a collection. ``source``: field of the batch. ``change``: what the model does with it before."""

    collection: int
    source: str
    change: str = "none"


@dataclass(frozen=True)
class Collection:
    """``tables``: (keys, pooling) of each. ``kind``: ``bags`` or ``sequences``."""

    kind: str
    tables: tuple[tuple[tuple[str, ...], str], ...]
    weighted: bool = False
    frozen: bool = False


@dataclass(frozen=True)
class Case:
    """``keys``: by KeyedJaggedTensor field of the batch. ``passes``: by pass, the batch sizes on each rank.

    ``cut``: after so many calls the first pass is left for the second one, 0 for never. ``loop``: whether passes end
    by StopIteration or by counting batches.
    """

    seed: int
    ranks: int
    collections: tuple[Collection, ...]
    lookups: tuple[Lookup, ...]
    keys: tuple[tuple[str, tuple[str, ...]], ...]
    ids: str
    batch: str
    optional: str
    extras: tuple[str, ...]
    loss: str
    habits: tuple[str, ...]
    precision: str
    dense: str
    sparse: str
    method: str
    micro_batches: int
    clustering: bool
    average: str
    preprocess: bool
    passes: tuple[tuple[tuple[int, ...], ...], ...]
    cut: int
    loop: str

    @property
    def reduction(self) -> str:
        return {"sum": "sum", "each": "none"}.get(self.loss, "mean")


#: What a model does with a KeyedJaggedTensor before it looks it up. Only the first keep the batch's ids.
KEPT = ("permute", "split", "rebuild", "concat", "others")
CHANGED = ("hash", "in place", "lengths")
LOSSES = (
    ["mean"] * 18
    + ["sum", "each", "tokens", "tokens", "penalty"] * 2
    + ["in batch", "in batch while training", "weighted", "weighted later", "masked", "baseline"]
)
HABITS = (
    "zero_grad", "model.zero_grad", "unused", "frozen weight", "export", "buffer", "counter", "eval", "seeds",
    "alias", "dropout off",
)  # fmt: skip


def draw_case(seed: int, ranks: int) -> Case:
    """The case of a seed."""
    r = random.Random(seed)
    keys = {"x": tuple(r.sample("abc", r.randint(1, 3)))}
    both = r.random() < 0.45
    if both:
        keys["y"] = keys["x"] if r.random() < 0.6 else tuple(r.sample("abc", r.randint(1, 3)))
    collections = tuple(_collection(r, tuple(set(k)), n) for n, k in enumerate(_chosen(r, keys)))
    lookups = []
    for n, collection in enumerate(collections):
        needed = {key for names, _ in collection.tables for key in names}
        fields = [field for field, names in keys.items() if needed <= set(names)]
        for field in r.sample(fields, r.randint(1, len(fields))):
            lookups.append(Lookup(n, field, _change(r, keys, field)))
        if r.random() < 0.15:
            lookups.append(Lookup(n, fields[0]))
    weighted = any(c.weighted for c in collections)
    loss = r.choice(LOSSES)
    return Case(
        seed=seed,
        ranks=ranks,
        collections=collections,
        lookups=tuple(lookups),
        keys=tuple(keys.items()),
        ids=r.choice(["one", "some", "some", "int32", "weights"]) + (" weights" if weighted else ""),
        batch=r.choice(["dataclass", "dataclass", "namedtuple", "dict", "nested", "own"]),
        optional=r.choice(["no", "no", "later", "at first", "always"]),
        extras=tuple(e for e in ("constant", "string", "number", "shared", "jagged", "list") if r.random() < 0.2),
        loss=loss,
        habits=tuple(h for h in HABITS if r.random() < (0.04 if h in ("buffer", "counter", "eval") else 0.15)),
        precision=r.choice(["float32"] * 6 + ["bfloat16", "float64", "none"]),
        dense=r.choice(["sgd", "sgd", "momentum", "adam", "adamw"]),
        sparse=r.choice(["sgd", "rowwise_adagrad"]),
        method=r.choice(["nestpipe"] * 4 + ["serial", "dbp-only", "fwp-only"]),
        micro_batches=r.choice([1, 2, 3, 4, 8]),
        clustering=r.random() < 0.2,
        average="samples" if loss == "tokens" else r.choice(["samples", "samples", "ranks"]),
        preprocess=r.random() < 0.15,
        **_loop(r, ranks),
    )


def _chosen(r: random.Random, keys: dict[str, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The keys that each collection may read: all of them are in one field."""
    return [keys[r.choice(list(keys))] for _ in range(r.choice([1, 1, 2]))]


def _collection(r: random.Random, keys: tuple[str, ...], number: int) -> Collection:
    keys = tuple(sorted(keys))
    tables = []
    left = list(keys[: r.randint(1, len(keys))])
    while left:
        names = tuple(left[: r.randint(1, len(left))])
        left = left[len(names) :]
        tables.append((names, r.choice(["SUM", "MEAN"])))
    if r.random() < 0.2:
        tables.append((tables[0][0][:1], "SUM"))  # one key, two tables
    kind = r.choice(["bags", "bags", "sequences"])
    weighted = kind == "bags" and r.random() < 0.2
    return Collection(kind, tuple((n, "SUM" if weighted else p) for n, p in tables), weighted, r.random() < 0.1)


def _change(r: random.Random, keys: dict[str, tuple[str, ...]], field: str) -> str:
    if r.random() < 0.04:
        return r.choice(CHANGED)
    change = r.choice(KEPT) if r.random() < 0.4 else "none"
    return "none" if change == "others" and len({len(k) for k in keys.values()}) != 1 else change


def _loop(r: random.Random, ranks: int) -> dict[str, object]:
    equal = r.random() < 0.6
    passes = []
    for _ in range(r.randint(1, 2)):
        steps = r.randint(2, 6)
        sizes = [r.choice([4, 6, 7, 9, 12]) for _ in range(steps)]
        if r.random() < 0.15:
            sizes[0] = 1
        by_rank = [sizes if equal else [r.choice([0, 1, 3, 6, 9]) for _ in range(steps)] for _ in range(ranks)]
        if ranks > 1 and not equal and r.random() < 0.3:
            by_rank[1] = by_rank[1][: r.randint(1, steps)]
        passes.append(tuple(tuple(s) for s in by_rank))
    counted = all(len({len(s) for s in sizes}) == 1 for sizes in passes)
    cut = r.randint(1, min(map(len, passes[0]))) if len(passes) > 1 and counted and r.random() < 0.3 else 0
    loop = r.choice(["count", "end"]) if counted else "end"
    return {"passes": tuple(passes), "cut": cut, "loop": loop}
