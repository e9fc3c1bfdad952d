"""Engines that run requests under a simulated or a wall clock, and the traces that feed them."""
