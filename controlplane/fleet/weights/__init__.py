"""Weights by region: where they are, and pulling them."""
