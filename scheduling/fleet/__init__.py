"""The fleet as arrays of instances, and their performance profiles."""
