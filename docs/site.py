"""Build the pages and a reference of the public names as a site: ``make docs``, then open ``build/site/index.html``.

The pages are copied as they lie in the checkout, so that links between them, and to the examples, are the same in both.
mkdocs checks them, and mkdocstrings makes the reference from the docstrings; any warning is an error.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
BUILD: Final = ROOT / "build"
SOURCE: Final = BUILD / "site-source"

#: Title in the site -> page.
PAGES: Final = {
    "fxprec": "README.md",
    "Training": "docs/training.md",
    "Frameworks": "docs/frameworks.md",
    "From the command line": "docs/command_line.md",
    "Numbers explained": "docs/numerics.md",
    "A step that is not finite": "docs/watch.md",
    "The mathematics of numerics": "docs/numerics_mathematics.md",
    "Coming from torch.amp or apex": "docs/migrating.md",
    "Which op runs in which precision": "docs/precision.md",
    "Fusion": "docs/fusion.md",
    "Performance": "docs/performance.md",
    "Lowering only what pays": "docs/lowering.md",
    "Limits": "docs/limits.md",
    "Design": "docs/design.md",
    "Writing passes": "docs/writing_passes.md",
    "Contributing": "CONTRIBUTING.md",
    "Changelog": "CHANGELOG.md",
}
#: What was measured: a page beside the results of each device.
MEASURED: Final = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "benchmarks" / "results").glob("*/README.md"))
#: Modules whose ``__all__`` is public.
PUBLIC: Final = ("fxprec", "fxprec.optim", "fxprec.numerics", "fxprec.testing", "fxprec.kernels")
#: Public, and without an ``__all__`` that imports everywhere: each wants its framework.
INTEGRATIONS: Final = {
    "fxprec.integrations.lightning": ("MixedPrecision",),
    "fxprec.integrations.transformers": ("Trainer", "ScalerMixin"),
    "fxprec.integrations.accelerate": ("use_scaler",),
    "fxprec.integrations.timm": ("NativeScaler",),
    "fxprec.integrations.torch_compile": ("backend",),
}

_CONFIGURATION: Final = """
site_name: fxprec
docs_dir: site-source
site_dir: site
use_directory_urls: false
theme: {{name: readthedocs, highlightjs: false}}
markdown_extensions: [tables, toc, pymdownx.superfences, pymdownx.highlight]
validation: {{links: {{anchors: warn, unrecognized_links: warn}}}}
plugins:
  - search
  - mkdocstrings:
      handlers:
        python:
          paths: ["{root}"]
          options: {{show_source: false, show_root_heading: false, show_root_toc_entry: false, heading_level: 3,
                     docstring_options: {{warnings: false}}}}
nav:
{nav}
"""


def main() -> int:
    """Build; returns mkdocs's exit status."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    SOURCE.mkdir(parents=True)
    pages = {ROOT / page for page in (*PAGES.values(), *MEASURED)}
    for path in pages | {target for page in pages for target in _linked(page)}:
        copied = SOURCE / path.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copied)
    (SOURCE / "reference").mkdir()
    nav = [f"  - {title}: {page}" for title, page in PAGES.items()]
    nav += ["  - Measured:", *(f"    - {Path(page).parent.name}: {page}" for page in MEASURED), "  - Reference:"]
    for name, text in references():
        (SOURCE / "reference" / f"{name}.md").write_text(text, encoding="utf-8")
        nav.append(f"    - {name}: reference/{name}.md")
    configuration = BUILD / "mkdocs.yml"
    configuration.write_text(_CONFIGURATION.format(root=ROOT, nav="\n".join(nav)), encoding="utf-8")
    # With --quiet mkdocs would not count the warnings that --strict is to stop at.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "-f", str(configuration)]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    return done.returncode


def _linked(page: Path) -> Iterator[Path]:
    """The files in the checkout that a page links to."""
    for target in re.findall(r"\]\((?!\w+:)([^)#\s]+)", page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve()
        if path.is_file():  # else mkdocs says what is missing
            yield path


def references() -> Iterator[tuple[str, str]]:
    """Name and text of the page of each public module."""
    for name in PUBLIC:
        module = importlib.import_module(name)
        found = {each: getattr(module, each) for each in sorted(module.__all__) if not each.startswith("_")}
        homes = {each: _home(value) for each, value in found.items() if not inspect.ismodule(value)}
        yield name, _reference(name, inspect.getdoc(module) or "", homes)
    homes = {f"{module}.{each}": f"{module}.{each}" for module, names in INTEGRATIONS.items() for each in names}
    yield "fxprec.integrations", _reference("fxprec.integrations", "See [the page](../docs/frameworks.md).", homes)


def _home(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _reference(name: str, about: str, homes: dict[str, str]) -> str:
    parts = [f"# {name}", about]
    for public, home in homes.items():
        parts += [f"## {public}", f"::: {home}"]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
