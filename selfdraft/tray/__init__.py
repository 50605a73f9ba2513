"""The icon in the menu bar: a server started, watched and stopped from there. Loads no model itself.

`tray.py` is the state machine, `surface.py` puts it on the screen; neither knows HTTP, which it is given.
"""
