"""Another process on a folder: `python -m tests.sessions.disk.beside ROOT read|write SECONDS`.

It opens the folder again and again, reads all that is there and, if it may, writes and has others evicted. Prints how
often it was the one that writes, and how many records it read and missed.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

from .support import is_right, offered, opened

CAP = 500_000


def main(root: Path, role: str, seconds: float) -> None:
    rng = random.Random(role)
    end = time.monotonic() + seconds
    counts = {"opened": 0, "writing": 0, "right": 0, "missed": 0}
    while time.monotonic() < end or not counts["right"]:
        store = opened(root, max_bytes=CAP)
        counts["opened"] += 1
        counts["writing"] += store.figures.writing
        known = store.records()
        for _ in range(5):
            handle = rng.choice(known)[1] if known else None
            offered(store, rng.randrange(1000), handle, size=rng.choice((20, 300, 3000)))
            for record, each in rng.sample(known, len(known)):
                counts["right" if is_right(store, record, each) else "missed"] += 1
            if role == "write":
                store.flush(10)
        store.close()
        if time.monotonic() > end + 30:
            break
    print(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
