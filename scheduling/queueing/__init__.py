"""The waiting set and the order in which it is served."""
