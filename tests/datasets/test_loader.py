"""The registry of data sets: what the configuration names is what can be loaded."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args, get_type_hints

import numpy as np

from nestpipe.config import DataConfig, ModelConfig
from nestpipe.data.dataset import Histories
from nestpipe.datasets import loader


def test_the_command_line_names_every_data_set():
    assert get_args(get_type_hints(DataConfig)["dataset"]) == tuple(loader.DATASETS)


def test_a_data_set_gives_histories_and_the_configuration_cuts_them(monkeypatch):
    def read(users, starts, counts):
        items = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        return np.concatenate(items), np.zeros(counts.sum())

    def made_up(config, seed):
        return Histories(items=9, lengths=np.array([4, 8]), test_items=np.array([4, -1]), read=read, bad_rows=seed)

    monkeypatch.setattr(loader, "DATASETS", {"synthetic": made_up})
    data = DataConfig(batch_size=3, negatives=2, windows="last")
    dataset = loader.load_dataset(data, ModelConfig(sequence_length=5), seed=7)
    assert {f.name for f in fields(Histories)} <= {f.name for f in fields(dataset)}
    batch = next(dataset.batches(0, 1))
    assert sorted(batch.sparse["history"].lengths().tolist()) == [4, 6]  # at most five inputs and their targets
    assert batch.extra["negative_ids"].shape == (2, 2) and dataset.bad_rows == 7
