"""Changes of a future: typed, checked, applied to a scenario, and described in words."""
