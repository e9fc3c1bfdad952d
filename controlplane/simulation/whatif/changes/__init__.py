"""Changes of a future against now: typed, checked, applied to a scenario, and put into words."""
