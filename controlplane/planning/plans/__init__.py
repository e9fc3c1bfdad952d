"""Scaling plans: what they are made from, and making them."""
