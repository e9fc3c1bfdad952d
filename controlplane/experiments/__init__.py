"""The papers' evaluations, measured again with our simulator, forecasters and planner: `manage.py reproduce`.

They join `scheduling` and `forecasting`, which know nothing of each other.
"""
