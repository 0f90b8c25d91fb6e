"""The data that lie packed in a page."""

from __future__ import annotations

import base64
import gzip
import json
import re
from typing import Any


def data_of(page: str) -> dict[str, Any]:
    """Of the text of a page's file."""
    found = re.search(r'<script type="application/gzip" id="data">([A-Za-z0-9+/=]*)</script>', page)
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))
