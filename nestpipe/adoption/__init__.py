"""A TorchRec user's own model and loop, trained by NestPipe. Importing it needs torchrec."""

from nestpipe.adoption.batches import BatchError
from nestpipe.adoption.losses import Summed
from nestpipe.adoption.pipeline import NestPipeline
from nestpipe.adoption.separable import NotSeparable

__all__ = ["BatchError", "NestPipeline", "NotSeparable", "Summed"]
