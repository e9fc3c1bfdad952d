"""The spot pool: instances that are donated, and reclaimed or redeployed (SageServe section 6.5)."""
