"""Ways to solve a planning problem: exact, by relaxation and local search, greedy."""
