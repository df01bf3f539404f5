"""Data sets by name: synthetic, MovieLens, KuaiRand; and Criteo's stream for the examples."""
