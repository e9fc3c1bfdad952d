"""Capacity plans: the least fleet for a growing demand, and whether the present one survives the loss of a region."""
