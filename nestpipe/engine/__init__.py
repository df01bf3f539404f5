"""The trainer that executes a schedule: its stages as functions, on lanes."""

from nestpipe.engine.engine import Engine

__all__ = ["Engine"]
