"""The run's ``report.html``: one file that opens offline, on a phone too, made from the run's other files."""

from __future__ import annotations

import jinja2

from acceler8.demo.charts import Chart, Point, Series, draw, smooth
from acceler8.demo.groups import group_coverage, group_health
from acceler8.demo.run_folder import Record, RunFolder

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("acceler8.demo"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def write_report(folder: RunFolder) -> None:
    """Write ``report.html`` of a finished run; RunError when one of its files is missing or damaged."""
    config, summary, plan = (folder.read_json(f"{name}.json") for name in ("config", "summary", "plan"))
    result = folder.read_json("result-fp8.json")
    html = _ENVIRONMENT.get_template("report.html.j2").render(
        name=folder.path.name,
        created=config["created"],
        settings=config["settings"],
        text=config["text"],
        environment=config["environment"],
        summary=summary,
        charts=_charts(folder.read_metrics()),
        health=group_health(result["health"]),
        plan=plan,
        coverage=group_coverage(plan["rows"]),
    )
    folder.write_text("report.html", html)


def _charts(metrics: list[Record]) -> list[Chart]:
    bf16, fp8 = (_losses(metrics, precision) for precision in ("bf16", "fp8"))
    width = max(1, len(bf16) // 40)
    difference = [(x, y - base) for (x, y), (_, base) in zip(fp8, bf16, strict=True)]
    mean = Series(label=f"mean of {width} steps", css="difference", points=smooth(difference, width))
    return [
        draw(
            "Training loss, nats per byte",
            [
                Series(label="BF16", css="bf16", points=smooth(bf16, width)),
                Series(label="FP8", css="fp8", points=smooth(fp8, width)),
            ],
        ),
        draw(
            "Difference FP8 - BF16 on the same batches, nats per byte",
            [
                Series(label="each step", css="raw", points=difference),
                *([mean] if width > 1 else []),
            ],
        ),
    ]


def _losses(metrics: list[Record], precision: str) -> list[Point]:
    return [(record["step"], record["loss"]) for record in metrics if record["precision"] == precision]
