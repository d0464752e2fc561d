"""Several processes call kernels on one GPU; each call must give the first one's bits and the reference's values.

    PYTHONPATH=. python benchmarks/shared_gpu.py --processes 16 --seconds 300 --random [--operation NAME …] [--load 2]
    PYTHONPATH=. python benchmarks/shared_gpu.py [--case NAME …] [--backend hopper] [--record FILE]

Prints faults as they come and at the end a line for each process and case. Exits with 1 if bits differed, a result was
wrong, or a process ended or hung.
"""

from __future__ import annotations

import sys

from flashlatte.bench.shared.command import main

if __name__ == "__main__":
    sys.exit(main())
