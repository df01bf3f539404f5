"""Real TorchRec: schedules as declared, a trainer, and what observes it."""
