"""Max mode: fans at maximum while something is generated, and given back whatever happens. Knows no model.

Who wants the fans holds a claim (`claims.py`), a locked file that lets go of itself when its process ends in whatever
way. One detached process, the watchdog (`watchdog.py`), sees the claims and alone moves the fans, through
ThermalForge (`thermalforge.py`). Everything below needs the standard library alone; `max_mode.py` is what models use.
"""
