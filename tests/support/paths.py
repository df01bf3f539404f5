"""Places that tests read from."""

from __future__ import annotations

import os
from pathlib import Path

#: The checkout.
ROOT = Path(__file__).resolve().parents[2]
#: The folder with MovieLens 100K's ``u.data``, if there is one.
MOVIELENS = Path(os.environ.get("NESTPIPE_ML100K", ROOT.parent / "shared" / "data" / "ml-100k"))
