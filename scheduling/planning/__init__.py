"""Plans for the next hour: how many instances of each model, in each region, on each GPU type (SageServe section 5)."""
