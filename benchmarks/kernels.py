"""Our kernels against what MLX has, on the GPU of this machine; see selfdraft/tuning/kernel_bench.py. Needs a GPU.

usage: kernels.py [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import mlx.core as mx

from selfdraft.tuning import kernel_bench


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", help="write the figures as JSON to this file")
    options = parser.parse_args()
    if not kernel_bench.available():
        print("kernels.py: there is no GPU here, and these kernels run on one only", file=sys.stderr)
        return 2
    info = mx.device_info()
    print(f"{info.get('device_name', 'GPU')}, mlx {mx.__version__}; checks {kernel_bench.checks()}", flush=True)
    copied = kernel_bench.copy_speed()
    print(f"copy {copied / 1e9:.0f} GB/s\n\n{'what':<34}{'ours us':>9}{'MLX us':>9}{'of copy':>9}", flush=True)
    rows = []
    for row in kernel_bench.kernel_rows(copied):
        rows.append(row)
        print(f"{row['what']:<34}{row['ours_us']:>9.1f}{row['mlx_us']:>9.1f}{row['share_of_copy']:>9.0%}", flush=True)
    if options.output:
        report = {"device": info, "mlx": mx.__version__, "copy_bytes_per_second": copied, "rows": rows}
        Path(options.output).write_text(json.dumps(report, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
