"""The search for an order: list scheduling and insertion begin it, annealing goes on, ties end it."""
