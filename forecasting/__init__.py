"""Predictions: request lengths now; workload series join with the forecasters. Imports nothing above and no Django."""
