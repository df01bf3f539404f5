"""2D-SP: two-dimensional sparse parallelism, alone and with NestPipe."""
