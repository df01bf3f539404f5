"""Random schedules from a grammar: lanes, offsets, order, rings, marks, 1 to 8 micro-batches, U into buffer or table.

Most are nearly right, since those that are wrong everywhere show little: each batch's own operations keep their order,
and edges are derived. Then some lose an edge or get a smaller ring.
"""

from __future__ import annotations

import random
from dataclasses import replace

from nestpipe.schedule.building import op, schedule
from nestpipe.schedule.operations import Op, Schedule
from nestpipe.schedule.stages import STAGES

#: Stages of one process group need one lane.
GROUPED = ("E", "G")


def random_schedule(seed: int) -> Schedule:
    """The schedule of ``seed``. It may be wrong in any way but a text that cannot be parsed."""
    draw = random.Random(seed)
    micro_batches = draw.choice((1, 1, 2, 2, 3, 4, 5, 8))
    updates_table = draw.random() < 0.3
    ahead = sorted((draw.randint(0, 4) for _ in range(3)), reverse=True)
    early = not updates_table and draw.random() < 0.6  # R and S of the next batch in this step
    offsets = dict(zip("PHK", (n + early for n in ahead), strict=True)) | {"R": int(early), "S": int(early)}
    own_lanes = {letter: draw.choice((STAGES[letter].lane, STAGES[letter].lane, "one", "two")) for letter in STAGES}
    own_lanes["G"] = own_lanes["E"]
    windows = draw.choice((1, 1, 2, micro_batches))  # how many micro-batches are in flight
    chains: list[list[Op]] = [[] for _ in range(6)]

    def add(chain: int, name: str, **access: str) -> None:
        chains[chain].append(op(name, lane=own_lanes[name[0]], **access))

    for letter in "PHK":
        add("PHK".index(letter), f"{letter}+{offsets[letter]}")
    add(3, f"R+{offsets['R']}")
    if early or draw.random() < 0.3:
        add(3, f"S+{offsets['S']}")
    for m in range(1, micro_batches + 1):  # E runs up to a window ahead, G behind
        chains[4].append(op(f"E.{m}", lane=own_lanes["E"]))
    compute: list[Op] = []
    for first in range(1, micro_batches + 1, windows):
        some = range(first, min(first + windows, micro_batches + 1))
        compute += [op(f"F.{m}", lane=own_lanes["F"]) for m in some]
        for m in some:
            compute += [op(f"B.{m}", lane=own_lanes["B"]), op(f"G.{m}", lane=own_lanes["G"])]
    ends = [op("A", lane=own_lanes["A"])]
    written = {"writes": "accumulator table"} if updates_table else {}
    ends += [op("U", lane=own_lanes["U"], **written), op("O", lane=own_lanes["O"])]
    draw.shuffle(ends)
    if next(o for o in ends if o.ref.stage == "A") is ends[-1] or ends[0].ref.stage == "O":
        ends.sort(key=lambda o: "AUO".index(o.ref.stage))
    if not updates_table:
        add(5, "W-1" if early or draw.random() < 0.3 else "W")
    body = _merged(draw, chains[4], compute) + ends
    front = (
        [*chains[0], *chains[1], *chains[2]] if len(set(ahead)) < 3 else _merged(draw, chains[0], chains[1]) + chains[2]
    )
    ops = [*chains[5], *front, *chains[3]] if chains[5] and chains[5][0].ref.batch else [*front, *chains[3]]
    ops = ops + body if not early else _early(draw, ops, body)
    if chains[5] and not chains[5][0].ref.batch:
        ops += chains[5]
    if draw.random() < 0.3:  # any two neighbours, whatever they are
        at = draw.randrange(len(ops) - 1)
        ops[at : at + 2] = reversed(ops[at : at + 2])
    if draw.random() < 0.2:
        ops = [replace(o, marks=("lossy",)) if o.ref.stage in GROUPED else o for o in ops]
    sizes = {
        "input": max(offsets["P"] - offsets["K"], 0) + draw.randint(1, 3),
        "batch": offsets["H"] + draw.randint(1, 3),
    }
    sizes |= {"plan": offsets["K"] + draw.randint(1, 4), "buffer": draw.randint(1 + early, 4)}
    sizes |= {"accumulator": draw.randint(1, 3), "received": draw.randint(1, micro_batches + 2)}
    sizes |= {"activation": draw.randint(windows, windows + 2), "gradient": draw.randint(1, 4)}
    if draw.random() < 0.1:
        sizes[draw.choice(["batch", "plan", "buffer", "input"])] = draw.choice((1, 2, 9, 17, 33, 48))
    result = schedule(f"random {seed}", micro_batches, ops, **sizes)
    if draw.random() < 0.15:
        result = _without_an_edge(draw, result)
    return result


def _merged(draw: random.Random, one: list[Op], other: list[Op]) -> list[Op]:
    """Both lists in their orders. An E comes before its F."""
    one, other, result = one.copy(), other.copy(), []
    while one or other:
        needs = other and one and other[0].ref.stage == "F" and one[0].ref.micro <= other[0].ref.micro
        take_one = bool(one) and (needs or not other or draw.random() < 0.4)
        result.append((one if take_one else other).pop(0))
    return result


def _early(draw: random.Random, front: list[Op], body: list[Op]) -> list[Op]:
    """``front`` merged into ``body``, but S after U and before O or after it."""
    late = [o for o in front if o.ref.stage == "S"]
    ops = _merged(draw, [o for o in front if o.ref.stage != "S"], body)
    at = next(i for i, o in enumerate(ops) if o.ref.stage == "U") + 1
    reads = next(i for i, o in enumerate(ops) if o.ref.stage == "R") + 1
    at = max(at, reads)
    return [*ops[:at], *late, *ops[at:]]


def _without_an_edge(draw: random.Random, whole: Schedule) -> Schedule:
    at = draw.choice([i for i, o in enumerate(whole.ops) if o.after])
    edges = list(whole.ops[at].after)
    edges.pop(draw.randrange(len(edges)))
    ops = [replace(o, after=tuple(edges)) if i == at else o for i, o in enumerate(whole.ops)]
    return replace(whole, ops=tuple(ops))
