"""Reads dashboards with Grafana's schema, writes them again, and names every field that is lost or changed."""

import json
import pathlib
import sys

import grafana_foundation_sdk.cog.plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard


def losses(given, written, place):
    """Yields the places of what is in `given` and not in `written`."""
    if isinstance(given, dict) and isinstance(written, dict):
        for name, value in given.items():
            if name not in written:
                yield f"{place}.{name} is not known to Grafana"
            else:
                yield from losses(value, written[name], f"{place}.{name}")
    elif isinstance(given, list) and isinstance(written, list) and len(given) == len(written):
        for at, (value, again) in enumerate(zip(given, written)):
            yield from losses(value, again, f"{place}[{at}]")
    elif given != written:
        yield f"{place} is {given!r}, and becomes {written!r}"


def panels_of(board):
    """Yields the panels of a dashboard, those of its rows included."""
    for panel in board["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def main(paths):
    grafana_foundation_sdk.cog.plugins.register_default_plugins()
    faults = count = 0
    for path in map(pathlib.Path, paths):
        given = json.loads(path.read_text())
        written = json.loads(JSONEncoder().encode(Dashboard.from_json(given)))
        panels = sum(1 for _ in panels_of(written))
        count += panels
        for loss in losses(given, written, path.name):
            faults += 1
            print(loss)
        print(f"{path.name}: {panels} panels")
    if count < 200:
        sys.exit(f"only {count} panels: the check is blind")
    if faults:
        sys.exit(f"{faults} fields are lost or changed")


main(sys.argv[1:])
