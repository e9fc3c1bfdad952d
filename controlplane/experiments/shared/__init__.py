"""Parts shared by experiments: fleets with their demand, forecasts, capability, measures."""
