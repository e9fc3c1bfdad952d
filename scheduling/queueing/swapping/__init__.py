"""Waiting times of instances that share their GPUs: service of groups, drains and swaps."""
