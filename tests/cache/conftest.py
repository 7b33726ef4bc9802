"""Where the cache's tests find their own helpers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
