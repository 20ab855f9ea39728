"""``Kubernetes`` stands for the API server, over TLS, with the requests that the sink sends.

It authorizes requests by the rules of the Helm chart, and checks each object against the OpenAPI
schema of Kubernetes, from the package ``kubernetes-validate``. It applies a strategic merge patch
to the conditions of a node, and answers errors as a ``Status``. ``described`` searches Events as
``kubectl describe node`` does.
"""

import copy
import http.server
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NoReturn

import kubernetes_validate
import trustme

from support.peers import Answer, HttpPeer, Request

NODE: Final = "aks-pool-12345-vmss000003"
NODE_UID: Final = "8a4a1f5e-9d0c-4a3b-9a51-7f7d0f3c2b11"
TOKEN: Final = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJub3RiZWZvcmUifQ.c2lnbmF0dXJl"
# the oldest version that AKS offers, and the newest version that the package has
VERSIONS: Final = ("1.29.0", kubernetes_validate.latest_version())
READY: Final = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
MERGE: Final = "application/strategic-merge-patch+json"
CHART_RULES: Final = (
    {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["create"], "namespace": "default"},
)
_EVENTS: Final = re.compile(r"/api/v1/namespaces/([a-z0-9-]+)/events")
_STATUS: Final = re.compile(r"/api/v1/nodes/([a-z0-9.-]+)/status")
_REASONS: Final = {
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "AlreadyExists",
    415: "UnsupportedMediaType",
    422: "Invalid",
}


class RefusalError(Exception):
    """Raised to answer a request with an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def status(code: int, message: str) -> Answer:
    """Return an error as the API server answers it."""
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": _REASONS.get(code, "InternalError"),
        "code": code,
    }
    return Answer(code, (("Content-Type", "application/json"),), json.dumps(body).encode())


class Kubernetes(HttpPeer):
    """An API server with one node.

    ``token``: the valid token. ``node``: the present state of the node. ``faults``: the reasons for
    which it refused requests that no client should send.
    """

    def __init__(self, directory: Path, rules: Iterable[dict[str, Any]] = CHART_RULES) -> None:
        self.node: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": NODE, "uid": NODE_UID},
            "status": {"conditions": [dict(READY)]},
        }
        self.events: dict[str, dict[str, Any]] = {}
        self.faults: list[str] = []
        self.token_file = directory / "token"
        self.ca_file = directory / "ca.crt"
        self._rules = list(rules)
        authority = trustme.CA()
        authority.cert_pem.write_to_path(self.ca_file)
        super().__init__(authority)
        self._simulated = Answer(299)  # stands for the answer that ``_simulate`` computes
        self.default = self._simulated
        self.rotate(TOKEN)

    def rotate(self, token: str) -> None:
        """Accept only this token from now on, and write it to the file of the service account."""
        self.token = token
        self.token_file.write_text(token, encoding="utf-8")

    def answer(self, handler: http.server.BaseHTTPRequestHandler, answer: Answer) -> None:
        """Send the answer that a test has set, or else that of an API server."""
        if answer is self._simulated:
            try:
                code, content = self._simulate(self.request(handler))
            except RefusalError as refusal:
                answer = status(refusal.code, str(refusal))
            else:
                headers = (("Content-Type", "application/json"),)
                answer = Answer(code, headers, json.dumps(content).encode())
        super().answer(handler, answer)

    def _simulate(self, request: Request) -> tuple[int, dict[str, Any]]:
        """Carry out a request, and return the status and the content of the answer."""
        if request.headers.get("authorization") != f"Bearer {self.token}":
            raise RefusalError(401, "Unauthorized")

        events = _EVENTS.fullmatch(request.path)
        if events is not None and request.method == "POST":
            self._authorize("create", "events", namespace=events[1])
            return 201, self._create_event(request, namespace=events[1])

        node = _STATUS.fullmatch(request.path)
        if node is not None and request.method == "PATCH":
            self._authorize("patch", "nodes/status")
            if node[1] != self.node["metadata"]["name"]:
                raise RefusalError(404, f'nodes "{node[1]}" not found')
            return 200, self._patch_node(request)
        reason = "the server could not find the requested resource"
        self.faults.append(reason)
        raise RefusalError(404, reason)

    def _refuse(self, code: int, reason: str) -> NoReturn:
        """Refuse a request that no client should send."""
        self.faults.append(reason)
        raise RefusalError(code, reason)

    def _authorize(self, verb: str, resource: str, namespace: str | None = None) -> None:
        for rule in self._rules:
            is_there = rule.get("namespace", namespace) == namespace
            if is_there and verb in rule["verbs"] and resource in rule["resources"]:
                return
        where = "at the cluster scope"
        if namespace is not None:
            where = f'in the namespace "{namespace}"'
        user = 'User "system:serviceaccount:notbefore:notbefore"'
        raise RefusalError(
            403, f'{resource} is forbidden: {user} cannot {verb} resource "{resource}" {where}'
        )

    def _create_event(self, request: Request, namespace: str) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(request.body)
        self._validate(event, "Event")
        name = event["metadata"]["name"]
        if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", name):
            self._refuse(422, f"metadata.name: {name!r} is no DNS subdomain")
        if event["metadata"].get("namespace", namespace) != namespace:
            self._refuse(400, "the namespace of the object does not match that of the request")
        # Kubernetes wants events of an object without namespace, as a node, in ``default``
        if event["involvedObject"].get("namespace", "") or namespace != "default":
            self._refuse(422, "involvedObject.namespace: does not match event.namespace")
        if len(event["message"]) > 1024 or len(event["reason"]) > 128:
            self._refuse(422, "too long")
        if name in self.events:
            raise RefusalError(409, f'events "{name}" already exists')
        self.events[name] = event
        return event

    def _patch_node(self, request: Request) -> dict[str, Any]:
        if request.headers.get("content-type") != MERGE:
            self._refuse(415, "the body of the request was in an unknown format")
        patch = json.loads(request.body)
        if set(patch) - {"status"} or set(patch.get("status", {})) - {"conditions"}:
            self._refuse(422, f"the patch changes more than conditions: {patch}")

        patched = copy.deepcopy(self.node)
        conditions: dict[str, dict[str, Any]] = {}
        for condition in patched["status"]["conditions"]:
            conditions[condition["type"]] = condition
        for condition in patch.get("status", {}).get("conditions", []):
            merged = conditions.setdefault(condition["type"], {}) | condition
            if merged.pop("$patch", None) == "delete":
                del conditions[condition["type"]]
            else:
                conditions[condition["type"]] = merged
        patched["status"]["conditions"] = list(conditions.values())
        self._validate(patched, "Node")
        self.node = patched
        return patched

    def _validate(self, content: dict[str, Any], kind: str) -> None:
        """Check an object against the schemas of its kind; ``strict`` allows no unknown fields."""
        if content.get("kind") != kind or content.get("apiVersion") != "v1":
            self._refuse(400, f"expected v1, {kind}")
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(content, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                self._refuse(422, f"{kind}: {error}")

    # ---- for tests

    @property
    def condition(self) -> dict[str, str] | None:
        """The condition that the sink sets, if the node has it."""
        for condition in self.node["status"]["conditions"]:
            if condition["type"] == "AzureScheduledEvent":
                return dict(condition)
        return None

    @property
    def described(self) -> list[dict[str, Any]]:
        """The Events of the node that ``kubectl describe node`` finds.

        It searches twice: by the uid of the node, and by its name in place of the uid.
        """
        wanted = [
            {"name": NODE, "namespace": "", "kind": "Node", "uid": uid} for uid in (NODE_UID, NODE)
        ]
        matching: list[dict[str, Any]] = []
        for event in list(self.events.values()):  # a request may add one meanwhile
            reference = {"namespace": "", **event["involvedObject"]}
            if any(terms.items() <= reference.items() for terms in wanted):
                matching.append(event)
        return matching
