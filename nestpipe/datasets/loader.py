"""The one way to a data set: by configuration.

A data set is a function from (configuration, seed) to the ``Histories`` of users: who met which items when. All of
them are trained on one task, the next item of a history (``nestpipe.models.next_item``); data without histories, such
as single clicks, needs a task of its own and cannot be added here. The function goes into DATASETS and its name into
``DataConfig.dataset``; the command line and the grids of sweeps follow from that.
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
    """The data set that ``config`` names, with samples as long as ``model`` reads. Raises DataError."""
    histories = DATASETS[config.dataset](config, seed)
    return Dataset(
        **vars(histories),
        batch_size=config.batch_size,
        negatives=config.negatives,
        sequence_length=model.sequence_length,
        windows=config.windows,
        seed=seed,
    )
