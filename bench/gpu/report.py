"""The results as a page for bench/results/."""

from typing import Any

from bench.gpu.results import commit

TWIN = "**Of the CPU twin with tiny sizes: this shows that the script runs, no more.**"


def report(lines: list[dict[str, Any]], names: list[str], command: str, twin: bool) -> str:
    """Markdown. names: of all steps, in order; those without a result are not measured."""
    by_step = {line["step"]: line for line in lines}
    found = by_step.get("environment", {}).get("figures", [])
    hardware = ", ".join(f"{f['name']} {f['value']} {f['unit']}".strip() for f in found)
    text = [f"# GPU results, commit {commit()}", "", f"Command: `{command}`", ""]
    text += [TWIN, ""] if twin else []
    text += [f"Machine: {hardware or 'not measured'}", ""]
    text += ["| step | figure | measured | goal |", "| --- | --- | --- | --- |"]
    for name in names:
        if name != "environment":
            text += _rows(name, by_step.get(name))
    return "\n".join(text) + "\n"


def _rows(name: str, line: dict[str, Any] | None) -> list[str]:
    if line is None or line["state"] in ("not measured", "began"):
        why = line["why"] if line is not None and line["why"] else "no time was left"
        return [f"| {name} | | not measured: {_cell(why)} | |"]
    if line["state"] == "failed":
        return [f"| {name} | | **failed**: {_cell(line['why'])} | |"]
    return [
        f"| {name} | {_cell(f['name'])} | {_cell(str(f['value']) + ' ' + f['unit'])} | "
        f"{_cell(f['goal'])} |"
        for f in line["figures"]
    ]


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "/").split())[:300]
