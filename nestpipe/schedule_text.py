"""The name that ``nestpipe.schedule.text`` had before; imports of it keep working."""

from nestpipe.schedule.text import load, to_text

__all__ = ["load", "to_text"]
