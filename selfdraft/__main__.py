"""`python -m selfdraft`: the same as the `selfdraft` command."""

from __future__ import annotations

import sys

from .cli.app import main

sys.exit(main())
