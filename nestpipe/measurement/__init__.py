"""From spans to step times, exposed communication and run records: one definition for real and simulated runs."""
