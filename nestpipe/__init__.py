"""NestPipe: nested pipelining for large-scale recommendation training (arXiv 2604.06956)."""

__version__ = "0.1.0"
