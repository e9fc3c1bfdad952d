"""The last hours of the ledger under each strategy."""
