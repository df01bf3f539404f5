"""The cost model fitted to published step times, and what the fit is worth."""
