"""``python -m fxprec``."""

from fxprec.command_line.main import main

if __name__ == "__main__":
    raise SystemExit(main())
