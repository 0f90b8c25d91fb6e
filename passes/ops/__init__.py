"""Facts that the compiler knows of ops: one canonical name for each, and one row of facts a name."""
