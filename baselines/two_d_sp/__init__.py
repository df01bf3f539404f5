"""2D-SP: two-dimensional sparse parallelism, by itself and with NestPipe."""
