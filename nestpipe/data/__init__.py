"""Data sets and batches."""

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.dataset import DataError, Dataset
from nestpipe.data.loader import load_dataset

__all__ = ["Batch", "DataError", "Dataset", "Jagged", "load_dataset"]
