"""The trainer that executes a schedule: stages are functions, and lanes run them."""

from nestpipe.engine.engine import Engine

__all__ = ["Engine"]
