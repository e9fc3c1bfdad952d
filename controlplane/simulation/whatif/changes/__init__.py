"""What a future changes against now: typed, checked, applied to a scenario, and said in plain words."""
