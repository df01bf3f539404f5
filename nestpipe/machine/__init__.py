"""What the machine offers: versions, compilers, files, progress bars."""
