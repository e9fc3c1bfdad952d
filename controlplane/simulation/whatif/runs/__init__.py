"""Runs of futures: made by workers, packed into rows, their decisions compared; and the nightly replay of the ledger."""
