"""Handlers around traced ops: what an op raises at run time is caught as in the model, or nothing was baked in."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxprec


class Own(RuntimeError):
    """An error that no op raises."""


class Swallows:
    def __enter__(self) -> None: ...

    def __exit__(self, *_error: object) -> bool:
        return True


class LetsPass:
    def __enter__(self) -> None: ...

    def __exit__(self, *_error: object) -> None: ...


@contextlib.contextmanager
def ended() -> Any:
    with contextlib.nullcontext():
        try:
            yield
        except RuntimeError:
            pass


@contextlib.contextmanager
def closed() -> Any:
    try:
        yield
    finally:
        pass


def one_clause(self: Any, x: Tensor) -> Tensor:
    try:
        return self.fc(x @ x)
    except RuntimeError:
        return self.fc(x)


def second_clause(self: Any, x: Tensor) -> Tensor:
    try:
        return self.fc(x @ x)
    except KeyError:
        return x
    except torch.OutOfMemoryError:
        return x + 1
    except (LookupError, RuntimeError) as error:
        return self.fc(x) * len(error.args)


def no_class(self: Any, x: Tensor) -> Tensor:
    try:
        return self.fc(x @ x)
    except:  # noqa: E722
        return self.fc(x)


def no_class_behind_others(self: Any, x: Tensor) -> Tensor:
    try:
        return self.fc(x @ x)
    except KeyError:
        return x
    except:  # noqa: E722
        return self.fc(x)


def starred(self: Any, x: Tensor) -> Tensor:
    try:
        x = x @ x
    except* KeyError:
        x = x + 1
    except* RuntimeError:
        pass
    return self.fc(x)


def errors() -> tuple[type[Exception], ...]:
    return KeyError, RuntimeError


def computed_classes(self: Any, x: Tensor) -> Tensor:
    try:
        return self.fc(x @ x)
    except errors():
        return self.fc(x)


def chosen_class(self: Any, x: Tensor) -> Tensor:
    try:
        return self.fc(x @ x)
    except RuntimeError if self.training else KeyError:  # noqa: B030
        return self.fc(x)


def returns_at_the_end(self: Any, x: Tensor) -> Tensor:
    try:
        x = x @ x
    finally:
        return self.fc(x)  # noqa: B012


def outer(self: Any, x: Tensor) -> Tensor:
    try:
        try:
            return self.fc(x @ x)
        except KeyError:
            return x
    except Exception:
        return self.fc(x)


def by_a_callee(self: Any, x: Tensor) -> Tensor:
    def product() -> Tensor:
        return x @ x

    with LetsPass():
        try:
            x = product()
        except (ValueError, RuntimeError):
            pass
    return self.fc(x)


def suppressed(self: Any, x: Tensor) -> Tensor:
    with contextlib.suppress(RuntimeError):
        x = x @ x
    return self.fc(x)


def by_an_exit(self: Any, x: Tensor) -> Tensor:
    with Swallows():
        x = x @ x
    return self.fc(x)


def by_a_generator(self: Any, x: Tensor) -> Tensor:
    with ended():
        x = x @ x
    return self.fc(x)


def other_errors(self: Any, x: Tensor) -> Tensor:
    try:
        return self.fc(x)
    except Own as error:
        raise ValueError from error


def at_the_end(self: Any, x: Tensor) -> Tensor:
    try:
        return self.fc(x)
    finally:
        del self


def other_errors_starred(self: Any, x: Tensor) -> Tensor:
    try:
        x = self.fc(x)
    except* KeyError:
        x = x + 1
    except* Own:
        pass
    return x


def not_around_ops(self: Any, x: Tensor) -> Tensor:
    try:
        scale = 1 / len(self._modules)
    except ArithmeticError:
        scale = 1.0
    except (ValueError, RuntimeError):
        scale = 2.0
    else:
        x = self.fc(x)
    with LetsPass(), closed():
        return self.fc(x) * scale


def net(forward: Callable[..., Any]) -> nn.Module:
    module = type("Net", (nn.Module,), {"forward": forward})()
    module.fc = nn.Linear(8, 8)
    return module


@pytest.mark.parametrize(
    "forward",
    [
        *(one_clause, second_clause, no_class, no_class_behind_others, starred, computed_classes, chosen_class),
        returns_at_the_end,
        *(outer, by_a_callee, suppressed, by_an_exit, by_a_generator),
    ],
    ids=lambda forward: forward.__name__,
)
def test_an_error_of_an_op_is_caught_as_in_the_model(forward: Callable[..., Any]) -> None:
    model = net(forward)
    square, other = torch.randn(8, 8), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = [model(square), model(other)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxprec.ServiceWarning)
        fxprec.convert(model, (square,), dtype=torch.bfloat16)
        for value, x in zip(expected, (square, other), strict=True):
            torch.testing.assert_close(model(x), value, atol=2e-2, rtol=2e-2, check_dtype=False)


@pytest.mark.parametrize(
    "forward", [other_errors, other_errors_starred, at_the_end, not_around_ops], ids=lambda forward: forward.__name__
)
def test_handlers_that_catch_nothing_of_ops_stay_static(forward: Callable[..., Any]) -> None:
    model, _ = fxprec.convert(net(forward), (torch.randn(8, 8),), capture="symbolic", dtype=torch.bfloat16)
    assert model(torch.randn(4, 8)).shape == (4, 8)


def test_the_decline_names_the_clause_and_the_line() -> None:
    with pytest.raises(fxprec.CaptureError, match=r"catches RuntimeError around ops, at test_source.py:\d+ `return"):
        fxprec.convert(net(one_clause), (torch.randn(8, 8),), capture="symbolic")
