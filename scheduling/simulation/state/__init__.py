"""A simulation's state: read out of one that runs, and put into another that goes on from there."""
