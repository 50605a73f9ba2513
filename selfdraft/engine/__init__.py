"""The cycle. Token ids in, token ids out: knows nothing of text, HTTP or files.

`Engine` advances any number of rows; a single request is a batch of one row.
"""

from .accept import RULES
from .depth import DepthStart
from .engine import Engine
from .inputs import Inputs
from .modes import EngineMode, Plan
from .prefill import SCORED_TOGETHER
from .profile import ProfiledCycle
from .row import Request, Row, TokenScores
from .session import Boundary, Cut, Session
from .threads import leave_tidily

__all__ = [
    "RULES",
    "SCORED_TOGETHER",
    "Boundary",
    "Cut",
    "DepthStart",
    "Engine",
    "EngineMode",
    "Inputs",
    "Plan",
    "ProfiledCycle",
    "Request",
    "Row",
    "Session",
    "TokenScores",
    "leave_tidily",
]
