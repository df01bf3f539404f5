"""Batches and what data sets have in common."""

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.dataset import DataError, Dataset

__all__ = ["Batch", "DataError", "Dataset", "Jagged"]
