"""Pure decision library: fleet arrays, routing, ordering, queueing, scaling, applications, simulation.

A policy is written once, here, and runs under two clocks: the live gateway and the simulator hold the fleet in the same
NumPy arrays and call the same compiled functions. Nothing in this package does I/O, reads a clock or draws unseeded
random numbers, and nothing in it imports Django or any other package of the project.
"""
