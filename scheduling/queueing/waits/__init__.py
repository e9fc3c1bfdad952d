"""How long what waits will wait: the RWT estimator, what is ahead in virtual queues, instances that start, corrections."""
