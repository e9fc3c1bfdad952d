"""Slow, plain Python references for the compiled code, in the shortest form."""
