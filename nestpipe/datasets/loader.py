"""The one way to a data set: by configuration."""

from __future__ import annotations

from nestpipe.config import DataConfig, ModelConfig
from nestpipe.data.dataset import Dataset
from nestpipe.datasets.kuairand import load_kuairand
from nestpipe.datasets.movielens import load_movielens
from nestpipe.datasets.synthetic import load_synthetic


def load_dataset(config: DataConfig, model: ModelConfig, seed: int) -> Dataset:
    """The data set that ``config`` names, with samples as long as ``model`` reads. Raises DataError."""
    loaders = {"synthetic": load_synthetic, "movielens": load_movielens, "kuairand": load_kuairand}
    return loaders[config.dataset](config, model, seed)
