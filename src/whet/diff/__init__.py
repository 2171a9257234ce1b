"""`whet diff`: where two runs part, and why, as far as their records tell."""
