"""UniEmb: an industrial engine without public code or paper. Its schedules here are reconstructions."""

from __future__ import annotations

from nestpipe.schedule.building import op, schedule
from nestpipe.schedule.operations import Schedule


def uniemb() -> Schedule:
    """A reconstruction of UniEmb as this engine runs it, from what is published about it.

    The published facts: tables are sharded, and lookups are fused (our engine retrieves all tables of a rank in one
    gather). Lookups are prefetched asynchronously and are stale by one step (notes on the paper), hence R(t+1) during
    batch t and no S. All2Alls are fully exposed (Table II: 1169 ms of TorchRec's 1208), hence one micro-batch and no
    All2All during dense compute.

    Our assumption: U(t) is applied to the table itself. If it were written over rows that were fetched before the last
    update, that update would be lost, but the published loss of quality (HR@10 -2.1e-3) points to late reads, not to
    lost updates. So R(t+1) misses U(t), and nothing else.
    """
    ops = [op("P+4"), op("H+3"), op("K+2"), op("R+1"), op("E.1"), op("F.1"), op("B.1"), op("G.1"), op("A")]
    ops += [op("U", writes="accumulator table"), op("O")]
    return schedule("uniemb", 1, ops)


def uniemb_with_hand_over() -> Schedule:
    """UniEmb for the simulator, which prices what Table II shows: a lookup of 36 ms stays exposed.

    That is the hand-over of the prefetched rows. Here it is ``S``, after the gradients have been exchanged but *before*
    the update. So a row that two neighbouring batches share is read without the earlier one's update.
    """
    ops = [op("P+4"), op("H+3"), op("K+2"), op("W-1"), op("R+1", after="S"), op("F.1"), op("B.1"), op("G.1"), op("A")]
    ops += [op("S+1", after="G.1"), op("U", after="G.1"), op("E+1.1"), op("O")]
    return schedule("uniemb", 1, ops)
