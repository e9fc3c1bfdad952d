"""Waiting times: the RWT estimator, work ahead in virtual queues, starting instances, measured corrections."""
