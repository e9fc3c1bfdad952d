"""Parts of `tests.bench.soak`: the stack, clients, an operator, a killer, and the final accounting."""
