"""Makes the fakes beside it importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for fake_executor and driver, which tests import
