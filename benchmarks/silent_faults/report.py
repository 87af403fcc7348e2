"""The table and the picture of results.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.silent_faults.faults import HERE, Fault, published_in

DETECTORS = {
    "verify": "`verify`",
    "exact": "`verify numerics=exact`",
    "loss": "loss curve within 1% of a golden one",
    "norm": "gradient norm within 1% of a golden one",
    "again": "losses `==` those of a second run",
    "recorder": "torch's flight recorder",
}
PLACED = {
    "module": "the module",
    "line": "the operation",
    "source": "a line of the source, in the file of the fault",
}
GROUPS = {
    "titanlike": "planted in the tests",
    "published": "published",
    "held_out": "held out",
}
README, PICTURE = HERE / "README.md", HERE / "results.svg"
_BETWEEN = re.compile(r"(<!-- results: \w+ -->\n).*?(<!-- end -->)", re.DOTALL)


def group_of(name: str) -> str:
    """Of GROUPS."""
    file = name.partition(":")[0]
    return file if file in GROUPS else "titanlike"


def shares(results: dict[str, Any], names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Detector, "module", "line" -> (faults that it finds, those that it can be asked about)."""
    of = [results[name] for name in names if "caught" in results.get(name, {})]
    found: dict[str, tuple[int, int]] = {}
    for detector in DETECTORS:
        asked = [each["caught"].get(detector) for each in of]
        asked = [answer for answer in asked if answer is not None]
        found[detector] = sum(asked), len(asked)
    of = [each for each in of if "verify" in each["caught"]]  # no hang
    for what in PLACED:
        found[what] = (
            sum(each["caught"]["verify"] and each.get(what, False) for each in of),
            len(of),
        )
    return found


def summary(results: dict[str, Any], faults: dict[str, Fault]) -> list[str]:
    groups = {title: [n for n in faults if group_of(n) == key] for key, title in GROUPS.items()}
    groups = {title: names for title, names in groups.items() if names}
    groups["all"] = [*faults]
    columns = {title: shares(results, names) for title, names in groups.items()}
    lines = [
        "| caught by | " + " | ".join(f"{t} ({len(n)})" for t, n in groups.items()) + " |",
        "|---|" + "---|" * len(groups),
    ]
    rows = {key: title for key, title in DETECTORS.items()}
    rows |= {key: f"`verify` names {title}" for key, title in PLACED.items()}
    for key, title in rows.items():
        cells = (f"{of[key][0]} of {of[key][1]}" for of in columns.values())
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return lines


def rows(results: dict[str, Any], faults: dict[str, Fault]) -> list[str]:
    lines = []
    for key, title in GROUPS.items():
        of = {name: fault for name, fault in faults.items() if group_of(name) == key}
        if not of:
            continue
        lines += [f"### {title.capitalize()}", ""]
        heads = ["fault", "source", "layout", "verify", "exact", "loss", "norm", "again"]
        heads += ["module", "operation", "s"]
        lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        for name, fault in of.items():
            found = results.get(name, {})
            caught = found.get("caught", {})
            marks = [
                _mark(caught.get(each)) for each in ("verify", "exact", "loss", "norm", "again")
            ]
            located = [
                _mark(found[each] and caught["verify"]) if "verify" in caught else ""
                for each in ("module", "line")
            ]
            seconds = str(found.get("seconds", {}).get("verify", ""))
            cells = [fault.fault, published_in(fault.source), f"`{fault.layout}`", *marks]
            lines.append("| " + " | ".join([*cells, *located, seconds]) + " |")
        lines.append("")
    return lines


def _mark(caught: bool | None) -> str:
    return {True: "yes", False: "**no**", None: ""}[caught]


def missed(results: dict[str, Any], faults: dict[str, Fault]) -> list[str]:
    """What verify does not catch, and what it does not place, each with the reason."""
    lines = []
    for name, fault in faults.items():
        found = results.get(name, {})
        if "caught" not in found:
            continue
        if fault.hangs:
            lines.append(f"- {fault.fault}: {fault.note}")
            continue
        lacks = [] if found["caught"]["verify"] else ["it is not caught"]
        if not lacks:
            lacks = [f"{PLACED[key]} is not named" for key in ("module", "line") if not found[key]]
        if lacks:
            said = "; ".join(line.strip() for line in found["first"][:2])
            lines.append(f"- {fault.fault}: {', '.join(lacks)}; {fault.note or said}")
    return lines


def write(results: dict[str, Any], faults: dict[str, Fault]) -> None:
    """Into README.md, between its marks, and the picture."""
    parts: dict[str, Callable[[], list[str]]] = {
        "summary": lambda: summary(results, faults),
        "faults": lambda: rows(results, faults),
        "missed": lambda: missed(results, faults),
    }

    def filled(match: re.Match[str]) -> str:
        name = match[1].split()[2]
        return match[1] + "\n".join(parts[name]()).rstrip() + "\n" + match[2]

    README.write_text(_BETWEEN.sub(filled, README.read_text()))
    _draw(shares(results, faults), len(faults))


def _draw(found: dict[str, tuple[int, int]], count: int) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "silent faults"
    titles = {key: title.replace("`", "") for key, title in DETECTORS.items()}
    titles["module"], titles["line"] = "verify: module named", "verify: operation named"
    titles["source"] = "verify: line in its file named"
    order = ["verify", "module", "line", "source", "exact", "norm", "loss", "again", "recorder"]
    order = [key for key in order if found[key][1]]
    figure, axes = plt.subplots(figsize=(8, 0.42 * len(order) + 1))
    for at, key in enumerate(order):
        caught, asked = found[key]
        own = key in ("verify", "exact", *PLACED)
        axes.barh(at, 100 * caught / asked, color="#2a6f97" if own else "#9a9a9a", height=0.65)
        axes.text(100 * caught / asked + 1, at, f"{caught} of {asked}", va="center", fontsize=9)
    axes.set_yticks(range(len(order)), [titles[key] for key in order], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 115)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel(f"percent of {count} silent faults, or of those that the detector applies to")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})
    plt.close(figure)
