"""Values for tests, and the sizes that the chart ships."""

import secured
from rendered import merged, values_files

NATS = {"servers": ["nats://nats:4222"]}
SCHEDULERS = {"scheduler": {"replicas": 2}}
# What the chart ships, and values that add processes or files to it.
SIZES = {
    **values_files(),
    "secured": merged(secured.VALUES, secured.TRAINER),
    "sharded": merged(secured.VALUES, {"draftStore": {"shards": 2, "replicas": 2}, "nats": NATS, **SCHEDULERS}),
}

MODELS = {"models": {"volume": {"persistentVolumeClaim": {"claimName": "m"}}}}
DOWNLOAD = {"image": "fetch:1", "command": ["fetch"], "env": [{"name": "TOKEN", "value": "x"}]}
ENGINE = {"kind": "vllm", "model": "m", "files": "/models/m"}
# Gateways offer the model of that engine.
OFFER = {**MODELS, "config": {"gateway": {"models": [{"id": "m", "files": "/models/m"}]}}}
# A pool whose engines come and go.
FOUND = {"referenceEngine": False, "replicas": 1, "engine": {"model": "m", "files": "/models/m"}}
SERVICE = "kubernetes:///services/vllm?port=8000"
EXTERNAL = {"referenceEngine": False, "replicas": 1, "url": "http://vllm:8000", "engine": ENGINE}


def pool(**keys):
    return {"workerPools": [{"name": "tiny", "replicas": 2, "referenceEngine": True, **keys}]}
