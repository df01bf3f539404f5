"""One step of a schedule, drawn."""
