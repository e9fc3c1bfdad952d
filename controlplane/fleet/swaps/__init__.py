"""Changing which of the instances that share their GPUs is awake: prices, the change itself, and what it took."""
