"""What the experiments share: fleets with their demand, forecasts, capability, advisors, measures."""
