"""`whet replay`: recompute recorded steps of a run, and compare them with the record bit for bit."""
