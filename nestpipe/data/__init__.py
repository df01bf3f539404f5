"""Batches and the data sets that produce them."""

from nestpipe.data.batch import Batch, Jagged

__all__ = ["Batch", "Jagged"]
