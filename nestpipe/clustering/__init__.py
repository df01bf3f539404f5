"""Key-centric clustering of a batch's samples into micro-batches."""

from nestpipe.clustering.clustering import cluster_batch, clustered

__all__ = ["cluster_batch", "clustered"]
