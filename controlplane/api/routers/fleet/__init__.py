"""Fleet routers: inventory, deployments, instances and their actions, model swaps."""
