"""The chart, rendered: its objects, and the containers in them."""

import base64
import functools
import os
import pathlib
from dataclasses import dataclass

import yaml
from helm_python.chart import Chart, lint

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "refrain"
RELEASE, NAMESPACE = "refrain", "llm"
# The program whose containers are tested. `run` builds it if nobody names one.
PROGRAM = os.environ.get("REFRAIN", str(ROOT / "target" / "debug" / "refrain"))


def values_files():
    """The sizes that the chart ships, by name. Without a file there are the defaults."""
    sizes = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((CHART / "values").glob("*.yaml"))}
    return {"defaults": {}, **sizes}


def lint_errors(values):
    return lint(str(CHART), values, strict=True)["errors"]


@functools.cache
def _chart():
    return Chart.load(str(CHART))


def _texts(values):
    return _chart().render(values or {}, name=RELEASE, namespace=NAMESPACE)


def render(values=None):
    """All objects of the chart."""
    files = [text for path, text in _texts(values).items() if path.endswith(".yaml")]
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [object for text in files for object in yaml.load_all(text, loader) if object]


def notes(values=None):
    texts = _texts(values)
    [text] = [text for path, text in texts.items() if path.endswith("NOTES.txt")]
    return text


def merged(one, other):
    """Values over others, as Helm does it."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return other
    both = {key: merged(one[key], other[key]) for key in one.keys() & other.keys()}
    return {**one, **other, **both}


def of_kind(objects, *kinds):
    return [object for object in objects if object["kind"] in kinds]


def named(objects, kind, name):
    [found] = [object for object in of_kind(objects, kind) if object["metadata"]["name"] == name]
    return found


@dataclass
class Workload:
    """A Deployment, a StatefulSet, or a pod of a hook, which has no other object around it."""

    object: dict

    @property
    def name(self):
        return self.object["metadata"]["name"]

    @property
    def kind(self):
        return self.object["kind"]

    @property
    def template(self):
        return self.object if self.kind == "Pod" else self.object["spec"]["template"]

    @property
    def pod(self):
        return self.template["spec"]

    @property
    def labels(self):
        return self.template["metadata"]["labels"]

    @property
    def component(self):
        return self.labels["app.kubernetes.io/component"]

    @property
    def main(self):
        return self.pod["containers"][0]

    @property
    def containers(self):
        return [*self.pod.get("initContainers", []), self.main]


def workloads(objects):
    return [Workload(object) for object in of_kind(objects, "Deployment", "StatefulSet")]


def pod_of_helm_test(objects):
    """The pod of `helm test`."""
    [found] = of_kind(objects, "Pod")
    return Workload(found)


def container_port(container, port):
    """The number of a port that is given by its name or number."""
    if isinstance(port, int):
        return port
    [number] = [entry["containerPort"] for entry in container["ports"] if entry["name"] == port]
    return number


def selects(selector, labels):
    return all(labels.get(key) == value for key, value in selector.items())


def entries(objects, kind, name):
    """The entries of a ConfigMap or Secret, as text."""
    object = named(objects, kind, name)
    if kind == "ConfigMap":
        return object["data"]
    encoded = {key: base64.b64decode(value).decode() for key, value in object.get("data", {}).items()}
    return {**encoded, **object.get("stringData", {})}
