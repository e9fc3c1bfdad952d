"""The requests of a simulation: from traces, or made."""
