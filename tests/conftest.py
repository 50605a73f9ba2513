"""What holds for all tests: reference BLAS, for which bit parity is claimed, no user's settings, no deadlines."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background: Ctrl-C is tested in children
    signal.signal(signal.SIGINT, signal.default_int_handler)

from selfdraft.device import choose_blas  # before MLX is imported
from selfdraft.settings import load_settings

_OURS = {"SELFDRAFT_BLAS"}  # may be chosen for a run of the tests; what else is theirs is called TESTS_
for _name in [name for name in os.environ if name.startswith("SELFDRAFT_") and name not in _OURS]:
    del os.environ[_name]
os.environ.setdefault("SELFDRAFT_BLAS", "reference")
os.environ["SELFDRAFT_SSD_SESSION_CACHE"] = "off"  # nor is anything left in their cache; tests of it say where
os.environ["SELFDRAFT_CONFIG_DIR"] = f"{os.devnull}/selfdraft"  # nobody's settings are read; to write them is an error
os.environ["XDG_DATA_HOME"] = f"{os.devnull}/selfdraft"  # nor what was tuned

choose_blas(load_settings().blas)

settings.register_profile("selfdraft", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("selfdraft")
