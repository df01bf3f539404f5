"""Data sets by name: synthetic, MovieLens, KuaiRand."""
