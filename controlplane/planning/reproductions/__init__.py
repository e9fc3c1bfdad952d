"""What the papers on scaling report, measured again with our simulator, forecasters and planner: `manage.py reproduce`.

It stands here because it joins `scheduling` and `forecasting`, which know nothing of each other.
"""
