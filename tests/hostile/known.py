"""Cases that fail on faults that are known and not mended yet: 'group-case' -> the fault. To be empty.

Strict: who mends a fault takes its lines away.
"""

KNOWN: dict[str, str] = {}
