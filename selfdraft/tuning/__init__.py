"""Measuring on this machine: what is measured, and models to measure with. Stands beside the server.

`tune` finds the depth that pays, each candidate in a process of its own (`worker`); `bench` measures all there is to
know about speed, and `plot` draws it. `measure` decodes for both. `synthetic` builds a model of a real one's shape
without a download; what it says is planted.
"""
