"""The report: one file, no address in it, and everything of the run on it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from acceler8.demo.report import write_report
from acceler8.demo.run_folder import RunFolder
from tests.demo.runs import STEPS

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Collects tags with attributes and the text; checks that tags are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def html(finished: RunFolder) -> str:
    return (finished.path / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_nothing_is_loaded_from_elsewhere(html: str, page: Page):
    assert "//" not in html  # no address of any scheme, with or without its name
    assert "@import" not in html
    assert not re.search(r"url\s*\(", html)
    loading = {"src", "href", "srcset", "data", "action", "poster", "xlink:href"}
    assert not [tag for tag, attributes in page.tags if loading & set(attributes)]
    assert not [tag for tag, _ in page.tags if tag in {"script", "link", "iframe", "img", "object", "embed"}]


def test_it_is_made_for_phones_and_for_the_dark(html: str, page: Page):
    metas = [attributes for tag, attributes in page.tags if tag == "meta"]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in metas
    assert "prefers-color-scheme: dark" in html
    tables = sum(tag == "table" for tag, _ in page.tags)
    assert tables == sum(a.get("class") == "scroll" for _, a in page.tags) >= 4


def test_both_curves_and_their_difference_are_drawn(page: Page):
    lines = {a["class"]: a["points"] for tag, a in page.tags if tag == "polyline"}
    assert set(lines) == {"bf16", "fp8", "raw"}
    for points in lines.values():
        assert points is not None
        assert len(points.split()) == STEPS
    assert lines["bf16"] != lines["fp8"]
    assert "BF16" in page.text
    assert "FP8" in page.text


def test_the_numbers_of_the_run_are_on_it(page: Page, finished: RunFolder):
    summary = finished.read_json("summary.json")
    for loss in summary["held_out_loss"].values():
        assert f"{loss:.4f}" in page.text
    for group in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"):
        assert group in page.text
    assert "14 of 15 layers are FP8" in page.text
    assert "emulated" in page.text
    config = finished.read_json("config.json")
    assert config["environment"]["torch"] in page.text
    assert config["text"]["sha256"] in page.text
    assert "täxt.txt" in page.text


def test_names_are_escaped(finished: RunFolder, tmp_path):
    copy = RunFolder.create(tmp_path, finished.read_json("config.json"))
    for name in ("summary", "plan", "result-fp8"):
        copy.write_json(f"{name}.json", finished.read_json(f"{name}.json"))
    for record in finished.read_metrics():
        copy.append_metrics(record)
    config = copy.read_json("config.json")
    config["text"]["source"] = "<script>alert(1)</script> & \udcff"
    copy.write_json("config.json", config)
    write_report(copy)
    html = (copy.path / "report.html").read_text(encoding="utf-8")
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    Page(html)


def test_a_long_run_gets_a_running_mean(finished: RunFolder, tmp_path):
    copy = RunFolder.create(tmp_path, finished.read_json("config.json"))
    for name in ("summary", "plan", "result-fp8"):
        copy.write_json(f"{name}.json", finished.read_json(f"{name}.json"))
    for precision in ("bf16", "fp8"):
        for step in range(1, 401):
            copy.append_metrics({"precision": precision, "step": step, "loss": 5 / step})
    write_report(copy)
    page = Page((copy.path / "report.html").read_text(encoding="utf-8"))
    assert "mean of 10 steps" in page.text
    assert "difference" in {a.get("class") for tag, a in page.tags if tag == "polyline"}
