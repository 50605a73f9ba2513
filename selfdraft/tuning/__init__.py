"""Measuring on this machine: what is measured, and models to measure with. Stands beside the server; decodes nothing.

`synthetic` builds a model of a real one's shape without a download; what it says is planted.
"""
