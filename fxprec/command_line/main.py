"""Run commands, tell their results, and exit: 0; 1: found what was asked for; 2: it cannot be done."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from torch import nn

from fxprec.command_line.target import Target, TargetError, load, told
from fxprec.convert import convert
from fxprec.costs.calibration import calibrate
from fxprec.costs.files import costs_of, path_of, write
from fxprec.errors import FxprecError, FxprecWarning
from fxprec.inspection.headline import Headline
from fxprec.inspection.report import Report, report
from fxprec.inspection.text import columns, plain, titled
from fxprec.kernels.cpu.compiled_attention import why_not
from fxprec.model.conversion import is_converted
from fxprec.numerics.audit import audit
from fxprec.numerics.locate import locate
from fxprec.numerics.problem import Problem, under
from fxprec.numerics.ranges import ranges
from fxprec.numerics.tune import Told, search
from fxprec.passes.costs.device_costs import DeviceCosts, Work, time_text
from fxprec.passes.graph.text import dtype_name
from fxprec.passes.policy.policy import LEVELS, Policy
from fxprec.scaling.loss_scaler import LossScaler

#: What ``--json`` is called with to print.
STDOUT: Final = Path("-")


def add_json(command: argparse.ArgumentParser) -> None:
    """Add ``--json`` to a command's arguments."""
    tells = "write all of it there as JSON; -: to stdout, and nothing else"
    command.add_argument("--json", type=writable, metavar="FILE", help=tells)


def writable(name: str) -> Path:
    """Return a path that can be written to, checked before the work."""
    path = Path(name)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{name!r} is a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}")
    return path


def tell(options: argparse.Namespace, found: Any, text: str = "") -> None:
    """Print a result, or write it as ``--json`` asks; ``found``: None, what JSON takes, or what has a ``to_dict``."""
    data = json.dumps(found.to_dict() if hasattr(found, "to_dict") else found, indent=1, allow_nan=False)
    if options.json == STDOUT:
        print(data)
        return
    if options.json is not None:
        options.json.write_text(data + "\n", encoding="utf-8")
    print(text or found)


#: Seconds that pass in silence, and between lines where stderr is no terminal.
_SILENT: Final = 2.0


class Waiting:
    """Context of long work: ``waiting.say("capturing")``."""

    def __init__(self) -> None:
        self._text = ""
        self._shown = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> Waiting:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        if self._shown and sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def say(self, what: str) -> None:
        """Set the text of what is done now."""
        self._text = what

    def _show(self) -> None:
        started = time.monotonic()
        while not self._over.wait(_SILENT):
            line = f"{self._text} ({time.monotonic() - started:.0f} s)"
            # A terminal overwrites one line; a log gets a line only when the text has changed.
            if sys.stderr.isatty():
                sys.stderr.write(f"\r\x1b[K{line}")
            elif self._text != self._shown:
                sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
            self._shown = self._text


_TARGET: Final = """TARGET is package.module:factory or file.py:factory. The factory is called without arguments and
gives model, (model, batches) or (model, batches, loss): batches are (*inputs, target), or dicts of arguments, and loss
is a function (output, target) -> scalar. A model that is not converted yet is converted, by --level, --policy and
--dtype."""
_STATUS: Final = "Exit status: 0; 1: what was asked for was found; 2: it cannot be done, with a line that says why."
_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def _in_fp32(headline: Headline) -> str:
    number = headline.products.get("float32", 0)
    return f"{number} of {sum(headline.products.values())}" if number else ""


#: ``--fail-on``: name -> (what there is of it in a headline, what it is).
FAILURES: Final[dict[str, tuple[Callable[[Headline], str], str]]] = {
    "outside": (lambda headline: "; ".join(headline.net), "code runs outside of the graphs"),
    "fp32-matmul": (_in_fp32, "a matrix product, convolution or attention computes in FP32"),
    "not-named": (lambda headline: "; ".join(headline.not_named), "methods call submodules and are not converted"),
    "risk": (lambda headline: "; ".join(headline.risks), "the report names a risk that is not the machine's"),
}


class _Parser(argparse.ArgumentParser):
    """Parser that says in one line what is wrong with the arguments."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.removeprefix('python -m ')}: {message}; --help tells more\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    options = parser().parse_args(arguments)
    try:
        # Warnings go to stderr in one line: stdout may be read by a program.
        with Waiting() as waiting, warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return options.run(options, waiting)
    except (FxprecError, ValueError, TypeError, OSError) as error:
        print(f"fxprec {options.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _show_warning(message: Warning | str, category: type[Warning], *where: Any) -> None:
    """Print one of our warnings in a line of its own; others show where the user runs the model with python."""
    if issubclass(category, FxprecWarning):
        print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    made = _Parser(
        prog="python -m fxprec",
        description="Mixed precision for PyTorch models: what runs in which dtype, what that costs, and what breaks.",
        epilog="python -m fxprec COMMAND --help tells of one.",
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[..., int], tells: str, batches: int, more: str, example: str
    ) -> argparse.ArgumentParser:
        # Help and description come of one text, so that they cannot differ.
        about = f"{tells[0].upper()}{tells[1:]}. {more} {_TARGET}"
        own = commands.add_parser(
            name,
            help=tells,
            description=textwrap.fill(about, 100),
            epilog=f"Example:\n  python -m fxprec {name} model.py:factory {example}\n\n{_STATUS}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        own.add_argument("target", metavar="TARGET", help="package.module:factory or file.py:factory")
        own.add_argument("--level", choices=LEVELS, help="of the conversion; default: O1")
        own.add_argument("--policy", type=Path, metavar="FILE", help="a policy as TOML, in place of a level")
        own.add_argument("--dtype", choices=_DTYPES, help="default: float16 on CUDA, bfloat16 elsewhere")
        add_json(own)
        own.add_argument("--batches", type=int, default=batches, metavar="N", help=f"take N; default: {batches}")
        own.set_defaults(run=run)
        return own

    own = command(
        "report", _report, "what runs in which dtype, and why", 1, "What stays FP32, why, and the risks.",
        "--html page.html --fail-on outside,fp32-matmul",
    )  # fmt: skip
    page: dict[str, Any] = {"type": writable, "metavar": "FILE", "help": "write a page to look into, too"}
    own.add_argument("--html", **page)
    own.add_argument("--nodes", action="store_true", help="a line a node, too")
    own.add_argument(
        "--fail-on",
        type=_failures,
        default=(),
        metavar="WHAT,...",
        help="exit with 1 where it is so: " + "; ".join(f"{name}: {about}" for name, (_, about) in FAILURES.items()),
    )
    method: dict[str, Any] = {
        "default": "forward",
        "metavar": "NAME",
        "help": "run this one, such as vae.decode, and not forward; default: forward",
    }
    own = command(
        "audit", _audit, "which op costs how much of the loss's error", 8, "The parts add up to the error.",
        "--batches 16 --html page.html",
    )  # fmt: skip
    own.add_argument("--gradients", action="store_true", help="explain the error of the gradients, too")
    own.add_argument("--method", **method)
    own.add_argument("--routes", action="store_true", help="tell which rounding flipped which top-k or comparison, too")
    own.add_argument("--savings", action="store_true", help="measure what an override of the largest rows saves")
    own.add_argument("--html", **page)
    own = command(
        "locate", _locate, "the first op that gives a NaN, an inf or a lost gradient", 1,
        "Where it is, why, and a cure to paste.",
        "--dtype float16 --scale 65536 --batches 100",
    )  # fmt: skip
    scale = {"type": float, "metavar": "S", "help": "the loss scale that steps are run with; default: 1"}
    own.add_argument("--scale", **scale)
    own.add_argument("--method", **method)
    own = command(
        "ranges", _ranges, "how large all values are", 8, "Exponents, flushed and saturated, headroom.",
        "--dtype float16",
    )  # fmt: skip
    own.add_argument("--scale", **scale)
    own.add_argument("--html", **page)
    own = command(
        "tune", _tune, "a policy for an error or a time", 32, "Predicted, then measured on other batches.",
        "--error 1e-3 --output policy.toml --html page.html",
    )  # fmt: skip
    budget = own.add_mutually_exclusive_group(required=True)
    budget.add_argument("--error", type=float, metavar="E", help="of the loss, root mean square: keep to it")
    budget.add_argument("--time", type=float, metavar="T", help="a fraction of the time that the policy takes now")
    own.add_argument("--output", type=writable, metavar="FILE", help="write the policy there, as TOML")
    own.add_argument("--html", **{**page, "help": "write a page of the model under it, with what differs from before"})
    _add_calibrate(commands)
    return made


def _failures(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in FAILURES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(FAILURES)}")
    return names


def _target(options: argparse.Namespace, waiting: Waiting, wants_batches: bool = True) -> Target:
    """Return the target, its model converted and captured."""
    waiting.say(f"importing {options.target}")
    if options.batches < 1:
        raise ValueError(f"--batches {options.batches}: at least one")
    target = load(options.target, options.batches)
    if wants_batches and not target.batches:
        raise TargetError(
            f"{options.target} gives no batches, which {options.command} runs: give (model, batches, loss)"
        )
    waiting.say("converting")
    model = _converted(options, target)
    if target.batches:
        waiting.say("capturing")
        _capture(options, Target(model, target.batches, target.loss))
    return Target(model, target.batches, target.loss)


def _capture(options: argparse.Namespace, target: Target) -> None:
    """Run the first batch."""
    # The first batch makes the graphs; the command's own run should draw the numbers that it would have drawn alone.
    with torch.random.fork_rng(devices=[]):
        run = Problem.of(target.model, target.loss, options.command, _method(options)).run
        told(f"{options.target}: the model failed on the first batch", run, target.batches[0])


def _converted(options: argparse.Namespace, target: Target) -> nn.Module:
    asked = [name for name in ("level", "policy", "dtype") if getattr(options, name) is not None]
    if is_converted(target.model):
        if asked:
            raise ValueError(f"--{asked[0]}: {options.target} gives a model that is converted already")
        return target.model
    # A model that the factory has converted is taken as it is: options would silently do nothing.
    policy = None if options.policy is None else Policy.from_toml(options.policy)
    dtype = None if options.dtype is None else _DTYPES[options.dtype]
    if (method := _method(options)) != "forward":  # the batches are its arguments, and not those of forward
        return convert(target.model, level=options.level, policy=policy, dtype=dtype, methods=(method,)).module
    # The sizes that the report tells of; a dict has no order of arguments.
    batch = target.batches[0] if target.batches else None
    example = tuple(batch[: len(batch) - (target.loss is not None)]) if isinstance(batch, tuple | list) else None
    return convert(target.model, example, level=options.level, policy=policy, dtype=dtype).module


def _method(options: argparse.Namespace) -> str:
    """Return the method that a command runs: for most there is no choice."""
    return getattr(options, "method", "forward")


def _report(options: argparse.Namespace, waiting: Waiting) -> int:
    target = _target(options, waiting, wants_batches=False)
    waiting.say("looking over the graphs")
    found = report(target.model)
    tell(options, found)
    if options.nodes and options.json != STDOUT:
        print(f"\n{found.nodes}")
    _write_page(options, lambda: found)
    status = 0
    # Every failing check is told, not only the first.
    for name in options.fail_on:
        if what := FAILURES[name][0](found.headline):
            print(f"fxprec report: fails on {name}: {what}", file=sys.stderr)
            status = 1
    return status


def _audit(options: argparse.Namespace, waiting: Waiting) -> int:
    target = _target(options, waiting)
    batches = Told("running", target.batches, waiting.say)
    how = {name: getattr(options, name) for name in ("gradients", "method", "routes", "savings")}
    found = audit(target.model, batches, target.loss, **how)
    tell(options, found)
    _write_page(options, lambda: report(target.model), ledger=found)
    return 0


def _locate(options: argparse.Namespace, waiting: Waiting) -> int:
    target = _target(options, waiting)
    scaler = _scaler(options)
    count = len(target.batches)
    for number, batch in enumerate(Told("running", target.batches, waiting.say), 1):
        if (found := locate(target.model, batch, target.loss, scaler, method=options.method)) is not None:
            tell(options, {"batch": number, **found.to_dict()}, f"batch {number} of {count}: {found}")
            return 1
    looked = "the 1 batch" if count == 1 else f"the {count} batches"
    tell(options, None, f"in {looked} taken (--batches) all is finite, and nothing was flushed that counts")
    return 0


def _ranges(options: argparse.Namespace, waiting: Waiting) -> int:
    target = _target(options, waiting)
    found = ranges(target.model, Told("running", target.batches, waiting.say), target.loss, _scaler(options))
    tell(options, found)
    _write_page(options, lambda: report(target.model), ranges=found)
    return 0


def _scaler(options: argparse.Namespace) -> LossScaler | None:
    return None if options.scale is None else LossScaler(init_scale=options.scale)


def _tune(options: argparse.Namespace, waiting: Waiting) -> int:
    target = _target(options, waiting)
    found = search(target.model, target.batches, target.loss, options.error, options.time, waiting.say)
    tell(options, found)
    if options.html is not None:
        waiting.say("looking over the graphs")
        # The page shows the model under the new policy; it has no graphs before a call.
        tuned = under(target.model, policy=found.policy)
        _capture(options, Target(tuned, target.batches, target.loss))
        _write_page(options, lambda: report(tuned), before=report(target.model))
    if options.output is not None:
        options.output.write_text(found.to_toml(), encoding="utf-8")
        print(f"written to {options.output}", file=sys.stderr)
    return 0


def _write_page(options: argparse.Namespace, found: Callable[[], Report], **measured: Any) -> None:
    """Write the page that ``--html`` asks for; ``found`` is called where it does."""
    if options.html is not None:
        found().to_html(options.html, **measured)
        print(f"written to {options.html}", file=sys.stderr)


# -- calibrate ---------------------------------------------------------------------------------------------------------

_ABOUT: Final = """Measure what matrix products, convolutions, attention, casts and compiled loops take on this machine,
and keep it for convert(..., lower="pays") and convert(..., fuse=True): some seconds, in which nothing else should run.
A CPU is measured with the number of threads that torch takes; with another number it is another machine."""
_MEASURED: Final = """Example:
  python -m fxprec calibrate --threads 4

Exit status: 0; 1: measured, and not written; 2: it cannot be done, with a line that says why."""


def _add_calibrate(commands: Any) -> None:
    """Add the command to a parser's."""
    command = commands.add_parser(
        "calibrate",
        help="measure what lowering costs on this machine",
        description=_ABOUT,
        epilog=_MEASURED,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    command.add_argument("--threads", type=int, help="of torch's, on a CPU; default: as torch has it")
    command.add_argument("--show", action="store_true", help="show the costs that serve now, and measure nothing")
    command.add_argument("--output", type=Path, help="keep them there, and not where convert looks")
    add_json(command)
    command.add_argument("--quick", action="store_true", help="two sizes only, to try the command; wants --output")
    command.set_defaults(run=_calibrate)


def _calibrate(options: argparse.Namespace, waiting: Waiting) -> int:
    """Run the command and return its exit status: 0, or 1 where the file cannot be written.

    Raises:
        ValueError: arguments that cannot be.
    """
    if options.quick and options.output is None and not options.show:
        raise ValueError("--quick measures too little for convert to go by: give --output FILE")
    if options.threads is not None:
        if options.threads < 1:
            raise ValueError(f"--threads {options.threads}: at least one")
        torch.set_num_threads(options.threads)
    # As ``convert`` chooses where nobody says.
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.show:
        tell(options, costs_of(device), _cost_table(costs_of(device)))
        return 0
    waiting.say("measuring")
    costs = calibrate(device, quick=options.quick)
    tell(options, costs, _cost_table(costs))
    if device == "cpu" and (why := why_not()):
        print(f"compiled loops were not measured: {why}. Shipped costs serve for them", file=sys.stderr)
    path = options.output or path_of(device)
    try:
        write(costs, path)
    except OSError as error:
        print(f"not written to {path}: {error}. Give --output FILE, or set FXPREC_CACHE_DIR", file=sys.stderr)
        return 1
    print(f"written to {path}", file=sys.stderr)
    return 0


def _cost_table(costs: DeviceCosts) -> str:
    rows: list[list[str]] = []
    for work in Work:
        curves = [of_work.get(work) for of_work in costs.curves.values()]
        for size in sorted({size for curve in curves if curve is not None for size, _ in curve.points}):
            times = ["-" if curve is None else time_text(curve(size)) for curve in curves]
            rows.append([str(work), f"{size:.3g}", *times])
    return plain(titled(str(costs), columns(("work", "size", *map(dtype_name, costs.curves)), rows)))
