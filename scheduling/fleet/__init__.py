"""The fleet as arrays of instances, and how fast each of them is: performance profiles."""
