"""Makes the helpers beside it importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for planning, which tests import
