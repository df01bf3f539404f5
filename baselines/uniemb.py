"""UniEmb: an industrial engine without public code or paper. Its schedule here is a reconstruction."""

from __future__ import annotations

from nestpipe.schedule import Schedule, op, schedule


def uniemb() -> Schedule:
    """A reconstruction of UniEmb's schedule, from what is published about it.

    Its lookups are prefetched asynchronously and are stale by one step (notes on the paper); its
    All2Alls are exposed whole (Table II: 1169 ms of TorchRec's 1208), hence one micro-batch and none
    of them beside dense compute; a lookup of 36 ms stays exposed (Table II): the hand-over of
    the prefetched rows, which stands here as ``S`` once the gradients have been exchanged but *before*
    the update. So a row that two neighbouring batches share is read without the earlier one's update.
    """
    ops = [op("P+4"), op("H+3"), op("K+2"), op("W-1"), op("R+1", after="S"), op("F.1"), op("B.1"), op("G.1"), op("A")]
    ops += [op("S+1", after="G.1"), op("U", after="G.1"), op("E+1.1"), op("O")]
    return schedule("uniemb", 1, ops)
