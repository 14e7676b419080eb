"""Checks objects against the schemas of their kinds. An object of a kind without a schema is an error."""

import json

import cloudcoil.models.cert_manager.v1 as cert_manager
import cloudcoil.models.keda.v1alpha1 as keda
import cloudcoil.models.prometheus_operator.v1 as prometheus
import jsonschema
import kubernetes_validate

# The oldest version that the chart allows, and the newest one with a schema here.
VERSIONS = ("1.30", "1.37")

MODELS = {
    "Certificate": cert_manager.Certificate,
    "ScaledObject": keda.ScaledObject,
    "PodMonitor": prometheus.PodMonitor,
    "PrometheusRule": prometheus.PrometheusRule,
    "ServiceMonitor": prometheus.ServiceMonitor,
}

_DURATION = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
_NAME = {"type": "string", "minLength": 1}


def _object(properties, required=()):
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": list(required),
    }


# The fields of gateway.networking.k8s.io/v1 that the chart uses. No package of Python has the schemas of that API.
HTTP_ROUTE = _object(
    {
        "apiVersion": {"const": "gateway.networking.k8s.io/v1"},
        "kind": {"const": "HTTPRoute"},
        "metadata": {"type": "object"},
        "spec": _object(
            {
                "parentRefs": {
                    "type": "array",
                    "minItems": 1,
                    "items": _object(
                        {"name": _NAME, "namespace": _NAME, "sectionName": _NAME, "port": {"type": "integer"}}, ["name"]
                    ),
                },
                "hostnames": {"type": "array", "items": _NAME},
                "rules": {
                    "type": "array",
                    "items": _object(
                        {
                            "backendRefs": {
                                "type": "array",
                                "items": _object({"name": _NAME, "port": {"type": "integer"}}, ["name", "port"]),
                            },
                            "timeouts": _object({"request": _DURATION, "backendRequest": _DURATION}),
                        }
                    ),
                },
            },
            ["parentRefs", "rules"],
        ),
    },
    ["apiVersion", "kind", "metadata", "spec"],
)


def lost_keys(given, read, path=""):
    """The keys of an object that a model did not read, which are misspelt."""
    if isinstance(given, dict):
        if not isinstance(read, dict):
            return [path]
        return [
            lost
            for key, value in given.items()
            for lost in (lost_keys(value, read[key], f"{path}.{key}") if key in read else [f"{path}.{key}"])
        ]
    if isinstance(given, list):
        pairs = zip(given, read if isinstance(read, list) else [], strict=True)
        return [lost for place, (one, other) in enumerate(pairs) for lost in lost_keys(one, other, f"{path}[{place}]")]
    return []


# What was checked before. Most values change a few objects only, and a check takes tenths of a second.
_checked = set()


def check(object):
    """Checks an object.

    Raises an error of the validator, or AssertionError for keys that the kind does not have.
    """
    text = json.dumps(object, sort_keys=True)
    if text not in _checked:
        _check(object)
        _checked.add(text)


def _check(object):
    kind = object["kind"]
    if kind == "HTTPRoute":
        jsonschema.validate(object, HTTP_ROUTE)
    elif kind in MODELS:
        read = MODELS[kind].model_validate(object)
        again = json.loads(read.model_dump_json(by_alias=True, exclude_none=True))
        lost = [key for key in lost_keys(object, again) if ".labels" not in key]
        assert not lost, f"{kind} has no {', '.join(lost)}"
    else:
        for version in VERSIONS:
            # Without a schema this raises "Couldn't find schema".
            kubernetes_validate.validate(object, version, strict=True)
