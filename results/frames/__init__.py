"""Records as data frames, and numbers of several kinds next to each other."""
