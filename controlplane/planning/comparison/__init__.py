"""The ledger's last hours simulated under each strategy."""
