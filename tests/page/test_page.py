"""The page in a real browser: no request, no error, and what one clicks and types does what it says."""

from __future__ import annotations

import functools
import importlib.util
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from fxprec.inspection.report import Report
from fxprec.numerics import audit, ranges
from fxprec.page import render
from fxprec.passes.graph.annotations import Rule
from page_data import data_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
in_a_browser = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None, reason="wants chromium and playwright"
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(layers)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).softmax(-1)


def report_of(model: nn.Module, **how: Any) -> Report:
    return fxprec.report(fxprec.convert(model, (torch.randn(5, 16),), dtype=torch.bfloat16, **how).module)


def written(report: Report, folder: Path, **more: Any) -> str:
    report.to_html(folder / "page.html", **more)
    return (folder / "page.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """``opened(page)``: the page in the browser; afterwards it has said nothing and asked nobody."""
    told: list[str] = []
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("dialog", lambda dialog: told.append(dialog.message))
    page.on("request", lambda request: request.url.startswith("file:") or told.append(request.url))

    def opens(text: str, where: str = "") -> Any:
        (tmp_path / "open.html").write_text(text, encoding="utf-8")
        page.goto(f"file://{tmp_path}/open.html{where}")
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield opens
    page.close()
    assert not told


def test_the_data_are_those_of_the_report(tmp_path: Path) -> None:
    report = report_of(Net())
    data = data_of(written(report, tmp_path))
    rows = [row for row in report.graphs[0].rows if row.kind != "shadow"]
    shadows = {row.node: row.reads[0] for row in report.graphs[0].rows if row.kind == "shadow"}
    assert [data["strings"][node[0]] for node in data["nodes"]] == [row.node for row in rows]
    for row, node in zip(rows, data["nodes"], strict=True):
        reads = [data["strings"][data["nodes"][at][0]] if at >= 0 else data["strings"][-1 - at] for at in node[16]]
        assert reads == [f"{shadows[name]} as its bfloat16 shadow" if name in shadows else name for name in row.reads]
        assert data["strings"][node[7]].replace("@", data["strings"][node[12]]) == row.why
    (linear,) = [node for node in data["nodes"] if data["strings"][node[0]] == "linear"]
    assert "blocks.0.up.weight as its bfloat16 shadow" in [data["strings"][-1 - at] for at in linear[16] if at < 0]
    assert linear[14] == 5 * 32 * 2, "bytes that it puts out"
    (seconds,) = [row.seconds for row in rows if row.node == "linear"]
    assert linear[15] == round(seconds * 1e9) > 0 and len(linear) == 17, "nothing was measured"


def bell(draw: random.Random) -> str:
    """How many values there are of each of 24 exponents, as a layer's are: by their logarithm, a digit each."""
    middle, slope = draw.uniform(12, 18), draw.uniform(0.4, 0.9)
    return "".join(
        str(min(9, max(0, round(9 - slope * abs(at - middle) + draw.uniform(-0.4, 0.4))))) for at in range(24)
    )


@functools.cache
def large(rows_wanted: int) -> dict[str, Any]:
    """A report of so many nodes, all measured with numbers of their own: converting so large a model takes minutes."""
    data, draw = report_of(Net(1)).to_dict(), random.Random(0)
    (graph,) = data["graphs"]
    rows = []
    for layer in range(rows_wanted // sum(row["kind"] != "shadow" for row in graph["rows"]) + 1):
        for row in graph["rows"]:
            renamed = {"node": f"{row['node']}_{layer}", "module": row["module"].replace("blocks.0", f"blocks.{layer}")}
            measured = {
                "errors": [(way, draw.random() * 1e-4) for way in ("forward", "backward")],
                "ranges": [
                    (way, "bfloat16", [-draw.randrange(9, 30), bell(draw), round(draw.uniform(90, 127), 1),
                                       round(draw.random(), 5), 0.0, 0.0, round(draw.random() ** 9, 5)])
                    for way in ("forward", "backward")
                ],
            }  # fmt: skip
            reads = [f"{name}_{layer}" for name in row["reads"]]
            rows.append(row | renamed | measured | {"bytes": draw.randrange(10**8), "reads": reads})
    data["graphs"] = [graph | {"rows": rows}]
    return data


@pytest.mark.slow
def test_a_page_of_ten_thousand_nodes_all_measured_is_below_a_megabyte() -> None:
    data = large(10_000)
    page = render(data, [])
    assert len(data_of(page)["nodes"]) >= 10_000 and len(page.encode()) < 1_000_000
    assert page == render(data, []), "equal reports are equal files"


def test_in_a_notebook_it_is_a_frame_of_its_own() -> None:
    frame = report_of(Net())._repr_html_()
    assert frame.startswith("<iframe srcdoc=") and 'sandbox="allow-scripts"' in frame
    assert "<script" not in frame and "&lt;script" in frame


def shows(page: Any, node: str) -> None:
    """The card comes to this node: a link's target is heard of later."""
    page.wait_for_function("node => document.querySelector('#card h2')?.textContent === node", arg=node, timeout=10_000)


@in_a_browser
def test_clicks_search_and_filters(opened: Any, tmp_path: Path) -> None:
    page = opened(written(report_of(Net()), tmp_path))
    assert page.text_content("#title") == "Net"
    assert page.text_content("#verdict").startswith("O1, bfloat16, mincut: all 7 matrix products in bfloat16")
    every = page.text_content("#found")
    page.fill("#search", "softmax exponentials")
    assert page.text_content("#found").startswith("1 of ") and page.locator("#list tbody tr").count() == 1
    page.locator("#list tbody tr").click()
    card = page.text_content("#card")
    assert "%softmax" in card and "full: exponentials and their sum" in card and "test_page.py" in card
    assert page.url.endswith("#node=0%2Fsoftmax")
    page.fill("#search", "")
    assert page.text_content("#found") == every
    page.select_option("#dtype", "bfloat16")
    assert {*page.locator("#list tbody tr td:nth-child(3)").all_text_contents()} == {"bfloat16"}
    page.select_option("#dtype", "")
    page.click('#tree button[data-module="blocks"]')
    page.click('#tree button[data-module="blocks.1"]')
    assert {*page.locator("#list tbody tr td:nth-child(5)").all_text_contents()} == {
        "blocks.1", "blocks.1.norm", "blocks.1.up", "blocks.1.down",
    }  # fmt: skip
    bar = page.locator('#tree button[data-module="blocks.1.norm"] .bar i')
    assert [bar.nth(part).bounding_box()["width"] > 0 for part in (0, 1)] == [False, True], "all of it is FP32"
    page.click('#tree button[data-module=""]')
    (mixed,) = page.locator("#drawing g", has_text="blocks").all()
    assert len(mixed.locator(".share").all()) == 2, "how much of it is low, and how much is not"
    page.click('#tree button[data-module="blocks.1"]')
    boxes = page.locator("#drawing text").all_text_contents()
    assert {"norm", "up", "down", "gelu", "add"} <= {*boxes}
    page.locator("#drawing g", has_text="up").first.click()
    assert page.locator('#tree button.chosen[data-module="blocks.1.up"]').count() == 1


@in_a_browser
def test_a_card_says_what_explain_says(opened: Any) -> None:
    model = fxprec.convert(Net(1), (torch.randn(5, 16),), dtype=torch.bfloat16).module
    data = fxprec.report(model).to_dict()
    (row,) = [row for row in data["graphs"][0]["rows"] if row["node"] == "linear_1"]
    row["served"] = "a kernel of this test"
    page = opened(render(data, []), "#node=0%2Flinear_1")
    card = dict(zip(*(page.locator(f"#card {tag}").all_text_contents() for tag in ("dt", "dd")), strict=True))
    told = dict(re.findall(r"^ {4}(reads|computes|puts out|because) +(.+)$", fxprec.explain(model, "linear_1"), re.M))
    assert told["puts out"].startswith(card["puts out"]) and card["puts out"].endswith(" (float32 in the original)")
    assert card["computes"] == told["computes"] and card["because"] == told["because"]
    assert [*map(str.strip, page.locator("#card dd", has_text="shadow").locator("span").all_text_contents())] == (
        told["reads"].split(", ")
    )
    assert card["served by"] == "a kernel of this test"


@in_a_browser
def test_links_keys_and_colours(opened: Any, tmp_path: Path) -> None:
    page = opened(written(report_of(Net()), tmp_path), "#node=0%2Fgelu_1")
    assert "%gelu_1" in page.text_content("#card")
    page.keyboard.press("j")
    following = page.text_content("#card h2")
    page.keyboard.press("k")
    assert following != "%gelu_1"
    shows(page, "%gelu_1")
    page.locator("#card a").first.click()
    shows(page, "%linear_2")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.press("Escape")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground
    assert page.evaluate("getComputedStyle(document.getElementById('strip')).color").startswith("rgb"), "of the mark"
    page.mouse.click(*[page.locator("#strip").bounding_box()[side] + 3 for side in ("x", "y")])
    shows(page, "%x")  # the first column is the first node


@in_a_browser
def test_two_reports_a_ledger_and_ranges(opened: Any, tmp_path: Path) -> None:
    policy = fxprec.Policy.preset("O1").override(modules={"head": Rule.FULL})
    model = fxprec.convert(Net(), (torch.randn(5, 16),), dtype=torch.bfloat16).module
    batches = [(torch.randn(5, 16), torch.randint(4, (5,)))]
    measured = {"ledger": audit(model, batches, F.cross_entropy), "ranges": ranges(model, batches, F.cross_entropy)}
    page = opened(written(fxprec.report(model), tmp_path, **measured, before=report_of(Net(), policy=policy)))
    assert page.locator("#compared td").first.text_content()[:2] != "0/", "one graph needs no number"
    differ = page.locator("#compared tbody tr", has_text="head").all_text_contents()
    assert any("linear_6" in line and "float32" in line and "bfloat16" in line for line in differ)
    page.locator("#compared tbody tr", has_text="linear_6").first.click()
    shows(page, "%linear_6")
    card = page.text_content("#card")
    assert "us of a step" in card
    assert re.search(r"forward: [<\d.]+ % of the whole", card) and re.search(
        r"low copy of head.weight: [<\d.]+ %", card
    )
    assert re.search(r"forward, bfloat162\^-?\d+ to 2\^-?\d+, headroom \d[\d.]* bits; 0.0 % saturated", card)
    assert re.search(r"gradient of head.weight, float322\^", card)
    assert page.locator("#card .bars").count() >= 4 and page.locator("#card .bars rect").count() > 12
    assert {"error", "ranges"} <= {*page.locator("#lines dt").all_text_contents()}
    strips = {}
    for measure in ("bytes", "one", "time", "error"):
        page.select_option("#measure", measure)
        strips[measure] = page.evaluate("document.getElementById('strip').toDataURL()")
    assert len({*strips.values()}) == 4, "each measure draws another strip"


@in_a_browser
def test_ten_thousand_nodes_open(opened: Any) -> None:
    """With fewer pixels than nodes a column of the strip is of several, of which the largest shown is chosen."""
    data = large(10_000)
    page = opened(render(data, [], data))  # in time: playwright waits for half a minute
    assert page.text_content("#found") == "10,010 of 10,010 nodes" and page.locator("#list tbody tr").count() == 300
    assert page.text_content("#drawing") == "1,822 boxes are too many to draw: choose a module in the tree."
    strip = page.locator("#strip").bounding_box()
    middle = {"x": int(strip["width"] / 2), "y": 40}
    page.fill("#search", "gelu")
    page.locator("#strip").click(position=middle)
    name = page.text_content("#card h2")
    assert name.startswith("%gelu_"), "one that is shown"
    per_column = -(-10_010 // int(strip["width"] - 2))
    assert per_column > 1 and abs(int(name.removeprefix("%gelu_")) - 455) <= 2, "in the middle of 910 layers"
    page.fill("#search", "")
    page.locator("#strip").click(position=middle)
    rows = {row["node"]: row["bytes"] for row in data["graphs"][0]["rows"] if row["kind"] != "shadow"}
    place = [*rows].index(page.text_content("#card h2")[1:])
    column = [*rows.values()][place // per_column * per_column :][:per_column]
    assert len(column) == per_column and rows[[*rows][place]] == max(column)


@in_a_browser
def test_what_is_empty_says_so_and_escape_shows_all(opened: Any, tmp_path: Path) -> None:
    page = opened(written(report_of(Net()), tmp_path))
    every = page.text_content("#found")
    page.select_option("#dtype", "float32")
    page.fill("#search", "no such node")
    assert page.text_content("#list .empty") == "No node is so: change the search or a filter, or press Escape for all."
    page.keyboard.press("Escape")  # out of the field
    page.keyboard.press("Escape")
    assert page.text_content("#found") == every and page.input_value("#search") == page.input_value("#dtype") == ""
    assert page.locator("#compared").is_hidden()


@in_a_browser
def test_modules_unfold_and_fold(opened: Any, tmp_path: Path) -> None:
    page = opened(written(report_of(Net()), tmp_path))
    blocks, below = (page.locator(f'#tree button[data-module="{each}"]') for each in ("blocks", "blocks.1.norm"))
    layer = page.locator('#tree button[data-module="blocks.1"]')
    assert blocks.get_attribute("aria-expanded") == "true" and layer.get_attribute("aria-expanded") == "false"
    layer.click()
    assert below.is_visible() and below.get_attribute("aria-expanded") is None, "nothing is below it"
    layer.click()
    assert below.is_hidden() and layer.get_attribute("aria-expanded") == "false"


HOSTILE = [
    "<script>alert(1)</script>", "</script><script>alert(2)</script>", "<img src=x onerror=alert(3)>", "<!--<script>",
    '"><svg onload=alert(4)>', "javascript:alert(5)", "&lt;b&gt;", "{{7*7}}", "${alert(6)}", "@@DATA@@", "__proto__",
    "\u2028", "]]>", "%00", "'+alert(7)+'",
]  # fmt: skip


class Named(nn.Module):
    """Modules under any names, one behind the other."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x)
        return x


@in_a_browser
def test_a_model_of_two_hundred_hostile_names(opened: Any, tmp_path: Path) -> None:
    """Its modules, its class and its docstring, the file that it is in, reasons of a policy: shown as they are."""
    names = [f"{text}{number}" for number in range(14) for text in HOSTILE if "." not in text]
    assert len(names) >= 200
    file = tmp_path / "<img src=x onerror=alert(8)>.py"
    file.write_text(
        "def forward(self, x):\n    for module in self.children():\n        x = module(x).relu()\n    return x\n"
    )
    space: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), space)
    hostile = type(HOSTILE[0], (Named,), {"__doc__": HOSTILE[1], "forward": space["forward"]})
    policy = fxprec.Policy.preset("O1").override(modules=dict.fromkeys(names[:3], Rule.FULL), ops={"relu": Rule.FULL})
    model = fxprec.convert(hostile(names), (torch.randn(5, 16),), dtype=torch.bfloat16, policy=policy).module
    batches = [(torch.randn(5, 16), torch.randn(5, 16))]
    measured = {"ledger": audit(model, batches, F.mse_loss), "ranges": ranges(model, batches, F.mse_loss)}
    page = opened(written(fxprec.report(model), tmp_path, **measured, before=report_of(hostile(names))))
    assert page.text_content("#title") == HOSTILE[0] and page.title() == f"{HOSTILE[0]}: fxprec"
    assert page.locator("#tree ul ul button").all_text_contents() == names
    reasons = " ".join(page.locator("#reason option").all_text_contents())
    assert "override modules" in reasons
    page.fill("#search", "linear override")
    page.locator("#list tbody tr").first.click()
    assert f"override modules '{names[0]}'" in page.text_content("#card")
    page.fill("#search", "")
    for name in names[:20]:
        page.locator("#tree ul ul button").nth(names.index(name)).click()
        page.locator("#list tbody tr").first.click()
        assert name in page.text_content("#card") and "<img src=x onerror=alert(8)>.py:3" in page.text_content("#card")
    assert page.locator("img, svg[onload], #card script, #list script, #tree script, #lines script").count() == 0


@in_a_browser
def test_two_hundred_hostile_names(opened: Any, tmp_path: Path) -> None:
    """In every text that a page shows: nothing runs, and all is shown as it is."""
    data = report_of(Net(6)).to_dict()
    names = [f"{text}{number}" for number in range(14) for text in HOSTILE]
    assert len(names) > 200
    rows = data["graphs"][0]["rows"]
    for number, name in enumerate(names):
        row = rows[number % len(rows)]
        row[("module", "op", "why", "source", "output", "region")[number % 6]] = name
    data["headline"] |= {"model": HOSTILE[0], "settings": HOSTILE[2], "verdict": HOSTILE[1]}
    data["graphs"][0]["inputs"] = HOSTILE
    page = opened(render(data, [(name, name) for name in names], data))
    assert data_of(render(data | {"headline": data["headline"] | {"model": "@@DATA@@"}}, []))["title"] == "@@DATA@@"
    assert page.text_content("#title") == HOSTILE[0] and page.text_content("#verdict") == f"{HOSTILE[2]}: {HOSTILE[1]}"
    assert page.locator("#lines dd").all_text_contents() == names
    for row in page.locator("#list tbody tr").all()[:40]:
        row.click()
    assert page.locator("img, svg[onload], #card script, #list script").count() == 0
