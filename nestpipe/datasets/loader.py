"""Loads a data set by its configuration; there is no other way to one.

A data set is a function from (configuration, seed) to the ``Histories`` of users: who interacted with which items, and
when. All data sets are trained on one task, the next item of a history (``nestpipe.models.next_item``). Data without
histories, such as single clicks, needs another task and cannot be added here. To add a data set, add its function to
DATASETS and its name to ``DataConfig.dataset``; the command line and the sweep grids follow from that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nestpipe.config import DataConfig, ModelConfig
from nestpipe.data.dataset import Dataset, Histories
from nestpipe.datasets.kuairand import kuairand_histories
from nestpipe.datasets.movielens import movielens_histories
from nestpipe.datasets.synthetic import synthetic_histories

#: By ``DataConfig.dataset``. Each raises DataError in one line for data that it cannot use.
DATASETS: Mapping[str, Callable[[DataConfig, int], Histories]] = {
    "synthetic": synthetic_histories,
    "movielens": movielens_histories,
    "kuairand": kuairand_histories,
}


def load_dataset(config: DataConfig, model: ModelConfig, seed: int) -> Dataset:
    """The data set that ``config`` names, with samples of the length that ``model`` reads. Raises DataError."""
    histories = DATASETS[config.dataset](config, seed)
    return Dataset(
        **vars(histories),
        batch_size=config.batch_size,
        negatives=config.negatives,
        sequence_length=model.sequence_length,
        windows=config.windows,
        seed=seed,
    )
