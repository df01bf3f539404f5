"""A training method is a schedule, and the schedule is data: stages, operations, templates and text form."""

from nestpipe.schedule.building import folded, marked, one_at_a_time, op, parse_ref, schedule
from nestpipe.schedule.frozen_window import frozen_window, fwp_only
from nestpipe.schedule.operations import MAX_MICRO_BATCHES, Op, Ref, Schedule
from nestpipe.schedule.order import with_derived_edges
from nestpipe.schedule.stages import STAGES, Stage
from nestpipe.schedule.templates import dbp_only, nestpipe, serial
from nestpipe.schedule.text import load, to_text

__all__ = [
    "MAX_MICRO_BATCHES",
    "STAGES",
    "Op",
    "Ref",
    "Schedule",
    "Stage",
    "dbp_only",
    "folded",
    "frozen_window",
    "fwp_only",
    "load",
    "marked",
    "nestpipe",
    "one_at_a_time",
    "op",
    "parse_ref",
    "schedule",
    "serial",
    "to_text",
    "with_derived_edges",
]
