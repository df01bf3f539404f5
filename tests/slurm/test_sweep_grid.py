"""Grid files: points, hashes, constraints, and errors that name file and line."""

from __future__ import annotations

import itertools
from dataclasses import fields
from pathlib import Path

import pytest

from nestpipe.config import RunConfig
from slurm.conditions import holds
from slurm.grid import GridError, by_shape, find_grid, load_grid
from slurm.node_hours import predict
from slurm.point import DEFAULTS, RUN_SETTINGS

SMALL = """\
[base]
batch_size = 16
micro_batch = 4
steps = 2

[[sweep]]
method = ["serial", "nestpipe"]
workers = [2, 4]
embedding_dim = [8, 16, 32]

[cluster]
tasks_per_node = 2
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "grid.toml"
    path.write_text(text)
    return path


def test_points_are_the_product_of_the_axes(tmp_path):
    grid = load_grid(write(tmp_path, SMALL))
    seen = {(p.method, p.workers, p["embedding_dim"]) for p in grid.points}
    assert seen == set(itertools.product(["serial", "nestpipe"], [2, 4], [8, 16, 32]))
    assert {p.micro_batches for p in grid.points if p.method == "nestpipe"} == {4}
    assert {s: len(p) for s, p in by_shape(grid.points, grid.cluster).items()} == {(1, 2): 6, (2, 2): 6}


def test_hash_depends_only_on_the_run(tmp_path):
    points = {p.hash for p in load_grid(write(tmp_path, SMALL)).points}
    reordered = SMALL.replace('["serial", "nestpipe"]', '["nestpipe", "serial"]').replace("[8, 16, 32]", "[32, 8, 16]")
    said = reordered.replace("steps = 2", "steps = 2\nnegatives = 64")  # 64 is the default
    assert {p.hash for p in load_grid(write(tmp_path, said)).points} == points
    other = load_grid(write(tmp_path, SMALL.replace("steps = 2", "steps = 3"))).points
    assert not points & {p.hash for p in other}


def test_hash_stays_the_same_forever(tmp_path):
    """With a new hash, everything that people have run already would run again."""
    assert load_grid(write(tmp_path, SMALL)).points[0].hash == "dc76ec429748"


def test_methods_without_micro_batches_run_once(tmp_path):
    text = SMALL.replace("embedding_dim = [8, 16, 32]", "micro_batch = [4, 8]")
    points = load_grid(write(tmp_path, text)).points
    assert sorted((p.method, p.workers, p.micro_batches) for p in points) == [
        ("nestpipe", 2, 2),
        ("nestpipe", 2, 4),
        ("nestpipe", 4, 2),
        ("nestpipe", 4, 4),
        ("serial", 2, 1),
        ("serial", 4, 1),
    ]


def test_conditions_leave_points_out(tmp_path):
    text = SMALL.replace("[cluster]", "where = [\"workers == 2 or method == 'nestpipe'\"]\n[cluster]")
    assert len(load_grid(write(tmp_path, text)).points) == 9


def test_points_of_several_sweeps_are_counted_once(tmp_path):
    text = SMALL.replace("[cluster]", '[[sweep]]\nmethod = "serial"\nworkers = 2\nembedding_dim = [8, 64]\n[cluster]')
    assert len(load_grid(write(tmp_path, text)).points) == 13


def test_points_larger_than_the_cluster_are_simulated(tmp_path):
    grid = load_grid(write(tmp_path, SMALL), {"max_workers": 2})
    assert {p.workers for p in grid.points if p.simulated} == {4}
    assert {p.hardware for p in grid.points if p.simulated} == {"h100-ib"}
    assert {p.hash for p in grid.points} != {p.hash for p in load_grid(write(tmp_path, SMALL)).points}


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("workers =", "worker =", 8, "unknown key 'worker' in [sweep]; did you mean 'workers'?"),
        ("steps = 2", "stepz = 2", 4, "unknown key 'stepz' in [base]; did you mean 'steps'?"),
        ("tasks_per_node", "nodes_per_task", 12, "unknown key 'nodes_per_task' in [cluster]"),
        ("[cluster]", "[clusters]", 11, "unknown table [clusters]"),
        ("[8, 16, 32]", "[8, 16, 32", 11, "not TOML"),
        ("[8, 16, 32]", "[]", 9, "embedding_dim has no value"),
        ("[8, 16, 32]", '["8"]', 9, "embedding_dim: '8' must be a whole number"),
        ("[8, 16, 32]", "[true]", 9, "embedding_dim: True must be a whole number"),
        ("[8, 16, 32]", "[0]", 9, "embedding_dim is 0; it must be at least 1"),
        ("workers = [2, 4]", "workers = [2, 0]", 8, "workers must be at least 1, not 0"),
        ("workers = [2, 4]", "workers = [2, 3]", 8, "3 workers do not fill nodes of 2 tasks"),
        ("micro_batch = 4", "micro_batch = 3", 3, "micro_batch 3 does not divide the batch of 16"),
        ('"serial"', '"serail"', 7, "unknown method 'serail'"),
        ('"serial"', '"2d-sp"', 8, "workers 3 cannot be split into replica_groups 2 of equal size"),
        ("steps = 2", "steps = 2\nwidth = 5", 5, "width 5 is not divisible by heads 2"),
        ("steps = 2", 'dataset = "kuairan"', 4, "must be one of 'synthetic', 'movielens'"),
        ("tasks_per_node = 2", "tasks_per_node = 0", 12, "tasks_per_node is 0"),
        ("tasks_per_node = 2", 'time = "1 h"', 12, "must be a number of at least 0"),
        ("tasks_per_node = 2", "time = 1", 11, "signal_delay_s of 90 leaves no time in 1 min"),
        ("[cluster]", 'where = ["worker == 2"]\n[cluster]', 11, "unknown name 'worker'; did you mean 'workers'?"),
        ("[cluster]", "where = [\"__import__('os')\"]\n[cluster]", 11, "only comparisons"),
    ],
)
def test_errors_name_file_and_line(tmp_path, old, new, line, words):
    if "2d-sp" in new:
        text = SMALL.replace("workers = [2, 4]", "workers = [2, 3]").replace("tasks_per_node = 2", "tasks_per_node = 4")
    else:
        text = SMALL
    path = write(tmp_path, text.replace(old, new))
    with pytest.raises(GridError) as error:
        load_grid(path)
    assert str(error.value).startswith(f"{path}:{line}: ")
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_grid_that_does_not_exist_lists_the_known_ones():
    with pytest.raises(GridError, match=r"no grid 'smok': one of paper, smoke, or a .toml file"):
        find_grid("smok")


@pytest.mark.parametrize(
    ("condition", "value"),
    [
        ("workers <= 8 or method == 'nestpipe'", True),
        ("2 < workers < 4", False),
        ("method in ['serial', 'uniemb']", False),
        ("not workers % 3", False),
        ("workers * 2 - 8 == 0 and -seed == -1", True),
    ],
)
def test_conditions(condition, value):
    assert holds(condition, {"workers": 4, "method": "nestpipe", "seed": 1}) is value


@pytest.mark.parametrize("name", ["smoke", "paper"])
def test_shipped_grids(name):
    grid = load_grid(find_grid(name))
    assert len(grid.points) >= {"smoke": 12, "paper": 60}[name]
    predictions = predict(grid.points, grid.cluster)
    assert all(predictions[p.hash].node_hours > 0 and predictions[p.hash].step_ms > 0 for p in grid.points)


def test_smoke_is_what_its_comment_says():
    grid = load_grid(find_grid("smoke"))
    assert len(grid.points) == 12 and grid.cluster.parallelism == 2
    assert set(by_shape(grid.points, grid.cluster)) == {(1, 2), (2, 2)}


def test_node_hours_count_nodes_start_and_all_steps(tmp_path):
    grid = load_grid(write(tmp_path, SMALL.replace("tasks_per_node = 2", "tasks_per_node = 2\nstart_s = 36")))
    by_workers = {p.workers: predict([p], grid.cluster)[p.hash] for p in grid.points if p.method == "serial"}
    for workers, nodes in ((2, 1), (4, 2)):
        seen = by_workers[workers]
        # 2 steps reported and 4 to warm up.
        assert seen.node_hours == pytest.approx(nodes * (36 + 6 * seen.step_ms / 1e3) / 3600)


def test_a_grid_can_set_what_a_run_can():
    elsewhere = {"methods", "workers", "micro_batches", "seed", "timeout", "checkpoint", "checkpoint_every", "resume"}
    not_on_a_cluster = {"testbed", "epochs", "data", "model", "optimizer"}
    assert {f.name for f in fields(RunConfig)} == {*RUN_SETTINGS, *elsewhere, *not_on_a_cluster}
    assert DEFAULTS["rounds"] == 1 and DEFAULTS["steps"] == RunConfig().steps
