"""Random cases: a model, its batches and its loop, all a function of one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

DIM, ROWS = 4, 17


@dataclass(frozen=True)
class Lookup:
    """One call of a collection.

    ``source``: field of the batch. ``change``: what the model does with the ids before. ``after``: with the rows.
    """

    collection: int
    source: str
    change: str = "none"
    after: str = "none"


@dataclass(frozen=True)
class Collection:
    """``tables``: (keys, pooling, rows) of each. ``kind``: ``bags`` or ``sequences``."""

    kind: str
    tables: tuple[tuple[tuple[str, ...], str, int], ...]
    weighted: bool = False
    frozen: bool = False
    indices: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of its outputs, in order."""
        return tuple(key for names, _, _ in self.tables for key in names)


@dataclass(frozen=True)
class Case:
    """``keys``: by KeyedJaggedTensor field of the batch. ``passes``: by pass, the batch sizes on each rank.

    ``repeat``: train twice from one seed, with dropout and a loader that draws from torch's generator, and compare
    both instead of comparing with a plain loop.
    ``keyed``: how KeyedJaggedTensors are made. ``late``: in which batches field y is there; ``optional``: the weight.
    ``cut``: after so many calls the first pass is left for the second one, 0 for never. ``stop``: the same for the
    last pass, after which training ends. ``loop``: whether passes end by StopIteration or by counting batches, or
    whether one iterator continues after each StopIteration.
    """

    seed: int
    ranks: int
    repeat: bool
    collections: tuple[Collection, ...]
    lookups: tuple[Lookup, ...]
    keys: tuple[tuple[str, tuple[str, ...]], ...]
    ids: str
    keyed: str
    late: str
    batch: str
    optional: str
    extras: tuple[str, ...]
    loss: str
    output: str
    habits: tuple[str, ...]
    precision: str
    dense: str
    update: str
    sparse: str
    stated: bool
    method: str
    micro_batches: int
    clustering: bool
    average: str
    preprocess: bool
    passes: tuple[tuple[tuple[int, ...], ...], ...]
    cut: int
    stop: int
    loop: str

    @property
    def reduction(self) -> str:
        return {"sum": "sum", "each": "none", "column": "none"}.get(self.loss, "mean")

    @property
    def summed(self) -> bool:
        return self.loss in ("tokens", "clicked")

    @property
    def may_be_refused(self) -> bool:
        """Whether it has something that need not be trained. Anything else that is refused is worth a look."""
        split = self.micro_batches > 1 and self.method != "dbp-only"
        return (
            (split and (self.loss in INSEPARABLE or bool({"buffer", "counter"} & set(self.habits))))
            or "eval" in self.habits
            or any(look.change in CHANGED for look in self.lookups)
            or (self.late != "always" and any(look.after != "none" or look.change != "none" for look in self.lookups))
            or (all(collection.frozen for collection in self.collections) and self.precision == "none")
        )


ALPHABETS = ("abc", ("a", "b", "c"), ("a", "a:weights", "b.c"), ("item", "x:item", ""))
#: What a model does with ids before it looks them up. Only the first keep those of the batch.
KEPT = ("permute", "split", "rebuild", "concat", "others", "subset")
CHANGED = ("hash", "in place", "lengths", "rolled", "truncated", "sometimes")
AFTER = ("detached", "no gradient", "in place", "twice")
#: Other sources of ids than a KeyedJaggedTensor: a JaggedTensor, an integer tensor [samples, 2].
OTHER_SOURCES = ("jagged ids", "dense ids")
SEPARABLE = ["mean"] * 12 + ["two", "sum", "each", "column", "tokens", "tokens", "clicked", "penalty", "normal"]
INSEPARABLE = (
    "in batch", "in batch while training", "weighted", "weighted later", "masked", "baseline", "centred", "listwise",
    "neighbour",
)  # fmt: skip
HABITS = (
    "zero_grad", "model.zero_grad", "unused", "frozen weight", "export", "seeds", "alias", "list", "dropout off",
    "evaluate", "deepcopy", "freeze later", "reuse", "outside", "checkpoint", "norm", "detach",
)  # fmt: skip
RARE_HABITS = ("buffer", "counter", "eval")
EXTRAS = (
    "constant", "string", "number", "shared", "jagged", "list", "flag", "matrix", "enum", "nothing", "pooled", "names",
)  # fmt: skip


def draw_case(seed: int, ranks: int) -> Case:
    """The case of a seed."""
    r = random.Random(seed)
    keys = _keys(r)
    collections = tuple(_collection(r, tuple(sorted(set(k)))) for k in _chosen(r, keys))
    lookups = tuple(_lookups(r, keys, collections))
    weighted = any(c.weighted for c in collections)
    loss = r.choice(INSEPARABLE) if r.random() < 0.12 else r.choice(SEPARABLE)
    plain = all(c.kind == "bags" for c in collections) and all(
        look.change == "none" and look.source in "xy" for look in lookups
    )
    others = any(look.change == "others" for look in lookups)
    summed = loss in ("tokens", "clicked")
    repeat = r.random() < 0.03
    return Case(
        seed=seed,
        ranks=ranks,
        repeat=repeat,
        collections=collections,
        lookups=lookups,
        keys=tuple(keys.items()),
        ids=r.choice(["one", "some", "some", "few", "int32", "weights"]) + (" weights" if weighted else ""),
        keyed=r.choice(["lengths", "lengths", "long lengths", "offsets", *(["inverse"] * 2 if plain else [])]),
        late="always" if others else r.choice(["always"] * 3 + ["at first", "later", "odd steps"]),
        batch=r.choice(["dataclass", "frozen", "namedtuple", "tuple", "dict", "ordered", "nested", "deep", "own"]),
        optional=r.choice(["no", "no", "later", "at first", "always"]),
        extras=tuple(e for e in EXTRAS if r.random() < 0.15),
        loss=loss,
        output=r.choice(["tensor", "tensor", "dict", "three", "nested", "jagged", "single"]),
        habits=tuple(h for h in HABITS if r.random() < 0.12) + tuple(h for h in RARE_HABITS if r.random() < 0.025),
        precision=r.choice(["float32"] * 6 + ["bfloat16", "float64", "none"]) if not repeat else "float32",
        dense=r.choice(["sgd", "sgd", "momentum", "adam", "adamw"]),
        update=r.choice(["plain"] * 3 + ["groups", "clip", "schedule"]),
        sparse=r.choice(["sgd", "rowwise_adagrad"]),
        stated=r.random() < 0.15,
        method=r.choice(["nestpipe"] * 4 + ["serial", "dbp-only", "fwp-only"]),
        micro_batches=r.choice([1, 2, 3, 4, 8]),
        clustering=r.random() < 0.2,
        average="samples" if summed else r.choice(["samples", "samples", "ranks"]),
        preprocess=r.random() < 0.15,
        **_loop(r, ranks),
    )


def _keys(r: random.Random) -> dict[str, tuple[str, ...]]:
    alphabet = r.choice(ALPHABETS)
    keys = {"x": tuple(r.sample(alphabet, r.randint(1, 3)))}
    if r.random() < 0.45:
        keys["y"] = keys["x"] if r.random() < 0.6 else tuple(r.sample(alphabet, r.randint(1, 3)))
    return keys


def _chosen(r: random.Random, keys: dict[str, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The keys that each collection may read: all of them are in one field."""
    return [keys[r.choice(list(keys))] for _ in range(r.choice([1, 1, 2]))]


def _lookups(r: random.Random, keys: dict[str, tuple[str, ...]], collections: tuple[Collection, ...]) -> list[Lookup]:
    found = []
    for n, collection in enumerate(collections):
        fields = [field for field, names in keys.items() if set(collection.keys) <= set(names)]
        for field in r.sample(fields, r.randint(1, len(fields))):
            after = r.choice(AFTER) if r.random() < 0.12 else "none"
            found.append(Lookup(n, field, _change(r, keys, field), after))
        if r.random() < 0.15:
            found.append(Lookup(n, fields[0]))
        if r.random() < 0.1 and not collection.weighted:
            found.append(Lookup(n, r.choice(OTHER_SOURCES)))
    if any(look.after in ("detached", "no gradient") for look in found):  # let something be trained
        found.append(Lookup(found[-1].collection, found[-1].source))
    return found


def _collection(r: random.Random, keys: tuple[str, ...]) -> Collection:
    tables = []
    left = list(keys[: r.randint(1, len(keys))])
    while left:
        names = tuple(left[: r.randint(1, len(left))])
        left = left[len(names) :]
        tables.append((names, r.choice(["SUM", "MEAN"]), r.randint(ROWS, 2 * ROWS)))
    if r.random() < 0.2:
        tables.append((tables[0][0][:1], "SUM", ROWS))  # one key, two tables
    kind = r.choice(["bags", "bags", "sequences"])
    weighted = kind == "bags" and r.random() < 0.2
    tables = [(names, "SUM" if weighted else pooling, rows) for names, pooling, rows in tables]
    return Collection(kind, tuple(tables), weighted, r.random() < 0.1, kind == "sequences" and r.random() < 0.2)


def _change(r: random.Random, keys: dict[str, tuple[str, ...]], field: str) -> str:
    if r.random() < 0.03:
        return r.choice(CHANGED)
    change = r.choice(KEPT) if r.random() < 0.4 else "none"
    return "none" if change == "others" and len({len(k) for k in keys.values()}) != 1 else change


def _loop(r: random.Random, ranks: int) -> dict[str, object]:
    equal = r.random() < 0.6
    passes = []
    for _ in range(r.choice([1, 2, 2, 3])):
        steps = r.randint(1, 4)
        sizes = [r.choice([4, 6, 7, 9, 12]) for _ in range(steps)]
        if r.random() < 0.15:
            sizes[0] = 1
        by_rank = [sizes if equal else [r.choice([0, 1, 3, 6, 9, 11]) for _ in range(steps)] for _ in range(ranks)]
        if not passes and not any(any(some) for some in by_rank):
            by_rank[0] = [7] * steps  # a first pass without samples is refused
        if ranks > 1 and not equal and r.random() < 0.3:
            by_rank[1] = by_rank[1][: r.randint(1, steps)]
        passes.append(tuple(tuple(s) for s in by_rank))
    counted = all(len({len(s) for s in sizes}) == 1 for sizes in passes)
    cut = r.randint(1, min(map(len, passes[0]))) if len(passes) > 1 and counted and r.random() < 0.3 else 0
    stop = r.randint(1, min(map(len, passes[-1]))) if counted and r.random() < 0.2 else 0
    loop = r.choice(["count", "end", "end" if cut else "again"]) if counted else "end"
    return {"passes": tuple(passes), "cut": cut, "stop": stop, "loop": loop}
