"""One instance: its engine step by step (reference), and many iterations at a time (compiled)."""
