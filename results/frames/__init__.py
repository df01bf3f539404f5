"""Records as data frames, and cells of one beside another."""
