"""What tenants may use: limits and budgets, counted in one place for all relays."""
