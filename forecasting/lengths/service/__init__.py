"""Length models while they answer: budget, cache, calibration, prior."""
