"""What is run for the tables and figures, part by part."""
