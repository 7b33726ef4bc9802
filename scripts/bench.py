"""Measure speed, on its own or against llama.cpp and Transformers with the same weights.

python scripts/bench.py decode --against llama.cpp,transformers --json decode.json
"""

from __future__ import annotations

import sys

from umbra.scripts.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
