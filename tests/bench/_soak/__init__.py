"""What `tests.bench.soak` is made of: a stack, clients, an operator, somebody who kills, and the accounting afterwards."""
