"""Rollouts: a changed deployment brought to its instances, one after another."""
