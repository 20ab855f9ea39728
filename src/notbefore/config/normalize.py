"""What may be written in several ways -> the one form that the structs take. Pure."""

from pathlib import Path
from typing import Any

from notbefore.config.secret import SOURCES
from notbefore.config.sinks import KINDS, EventHub
from notbefore.core.routing import VM_FACTS


def prepared(values: dict[str, Any], base: Path) -> dict[str, Any]:
    """Return the values with secrets as mappings, matchers as lists, and paths below ``base`` as absolute ones."""
    values = dict(values)
    if isinstance(values.get("sinks"), dict):
        values["sinks"] = {name: _prepared_sink(sink, base) for name, sink in values["sinks"].items()}
    if isinstance(values.get("otlp"), dict):
        values["otlp"] = _prepared_keys((), values["otlp"], base)
        if isinstance(values["otlp"].get("logs"), dict):
            values["otlp"]["logs"] = _prepared_keys((), values["otlp"]["logs"], base)
    if isinstance(values.get("fleet"), dict):
        values["fleet"] = {
            key: _prepared_keys(EventHub.SECRETS, value, base) if isinstance(value, dict) else value
            for key, value in _prepared_keys((), values["fleet"], base).items()
        }
    if isinstance(values.get("heartbeat"), dict):
        values["heartbeat"] = _prepared_keys(("ping_url",), values["heartbeat"], base)
    if isinstance(values.get("routes"), list):
        values["routes"] = [_prepared_route(route) for route in values["routes"]]
    approval = values.get("approval")
    if isinstance(approval, dict) and isinstance(approval.get("rules"), list):
        values["approval"] = {**approval, "rules": [_prepared_route(rule) for rule in approval["rules"]]}
    if isinstance(values.get("records"), dict):
        values["records"] = _with_names(values["records"], "tags")
    if isinstance(values.get("server"), dict):
        values["server"] = _prepared_server(values["server"], base)
    return values


def _prepared_server(server: dict[str, Any], base: Path) -> dict[str, Any]:
    server = dict(server)
    if isinstance(server.get("web_config_file"), str):
        server["web_config_file"] = str(base / server["web_config_file"])
    return _with_names(server, "allowed_hosts")


def _with_names(section: dict[str, Any], key: str) -> dict[str, Any]:
    """With a list of names; an environment variable has them as one text, with commas between them."""
    names = section.get(key)
    return {**section, key: [name.strip() for name in names.split(",")]} if isinstance(names, str) else section


def _prepared_sink(sink: Any, base: Path) -> Any:
    if not isinstance(sink, dict):
        return sink
    return {kind: _prepared_settings(kind, settings, base) for kind, settings in sink.items()}


def _prepared_settings(kind: str, settings: Any, base: Path) -> Any:
    if kind not in KINDS or not (settings is None or isinstance(settings, dict)):
        return settings
    return _prepared_keys(KINDS[kind].SECRETS, settings or {}, base)  # `windows_event_log:` has nothing below it


def _prepared_keys(secrets: tuple[str, ...], settings: dict[str, Any], base: Path) -> dict[str, Any]:
    prepared: dict[str, Any] = {}
    for key, value in settings.items():
        name, _, source = str(key).rpartition("_")
        if name in secrets and source in SOURCES:
            prepared[name] = _found_at(base, {source: value})
        elif str(key).endswith("_file") and isinstance(value, str):
            prepared[key] = str(base / value)
        elif key in ("headers", "secrets") and isinstance(value, dict):
            prepared[key] = {header: _found_at(base, secret) for header, secret in value.items()}
        else:
            prepared[key] = value if key not in secrets else _found_at(base, value)
    return prepared


def _found_at(base: Path, secret: Any) -> Any:
    if isinstance(secret, dict) and isinstance(secret.get("file"), str):
        return {**secret, "file": str(base / secret["file"])}
    return secret


def _prepared_route(route: Any) -> Any:
    if not isinstance(route, dict):
        return route
    if "remind_before" in route:
        route = {**route, "remind_before": _listed(route["remind_before"])}
    if not isinstance(route.get("match"), dict):
        return route
    lists = ("change", "event_type", "event_status", "event_source", "scope", *VM_FACTS)
    match: dict[str, Any] = {key: _listed(value) if key in lists else value for key, value in route["match"].items()}
    if isinstance(match.get("tags"), dict):
        match["tags"] = {name: _listed(value) for name, value in match["tags"].items()}
    return {**route, "match": match}


def _listed(value: Any) -> list[Any]:
    """A list of texts: one value may stand without brackets, and a number (`zone: 1`) without quotes."""
    values = value if isinstance(value, list) else [value]
    return [str(one) if isinstance(one, int) and not isinstance(one, bool) else one for one in values]
