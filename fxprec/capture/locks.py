"""One capture at a time in a process."""

from __future__ import annotations

import threading
from typing import Final

#: Held while a forward is traced or compiled. Both reach into state of the whole process: tracing patches nn.Module,
#: compiling patches dynamo's configuration, and dynamo must see neither patch of the other.
CAPTURING: Final = threading.RLock()
