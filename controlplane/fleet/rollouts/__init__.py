"""Rollouts: bringing a changed deployment to its instances, one by one."""
