"""``python -m fxprec``."""

from fxprec.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
