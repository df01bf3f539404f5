"""Step times, exposed communication and run records from spans, by one definition for real and simulated runs."""
