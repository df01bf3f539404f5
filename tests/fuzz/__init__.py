"""A differential fuzzer of NestPipeline: random models, batches and loops against a plain loop. See ``__main__``."""
