"""`selfdraft doctor`: what is wrong with an installation, and the fix. One file a kind of finding.

`registry` runs the checks, which register themselves; `report` puts findings together; `bundle` writes them to a file
for others, without what is nobody's business (`redaction`). Checks import what they look at inside their functions:
nothing here needs MLX, or anything else, to be whole.
"""
