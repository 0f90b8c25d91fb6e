"""Random programs and random stateful modules by seed: ``python -m tests.fuzz --help``, from a checkout's root.

- ``programs``: straight-line programs through the pass pipeline (steps.py, programs.py).
- ``stateful``: modules that read and write Python state, share memory, change modes, and are called, changed, copied
  and converted in random order (features/, source.py), each next to a twin that is not converted (worlds.py,
  compare.py, stateful.py).
"""
