"""Waiting times: the RWT estimator, the work ahead in virtual queues, starting instances, and corrections from measured
waits.
"""
