"""Backends of units that are no LLM (Hermes section 3.4): containers and DNN servers, started before a unit needs them.

An actuator starts one and ends it. Docker is used where its socket is there and the backend has an image, a subprocess of
this machine otherwise. No Django here.
"""
