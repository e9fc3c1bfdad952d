"""Swaps between instances that share their GPUs: estimated times, the swap, and measured times."""
