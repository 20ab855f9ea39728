"""What the Azure SDK says of a hub that cannot be read becomes a sentence that says what to do."""

import pytest
from azure.core.exceptions import HttpResponseError

from notbefore.config.fleet import FleetConfig
from notbefore.config.secret import Secret
from notbefore.config.sinks import EventHub
from notbefore.fleet.hub_errors import explained, store_explained

IDENTITY = FleetConfig(EventHub(namespace="a.servicebus.windows.net", hub="changes"), consumer_group="oncall")
KEY = FleetConfig(EventHub(connection_string=Secret("Endpoint=sb://a/;SharedAccessKey=s3cret;EntityPath=changes")))
REFUSED = "CBS Token authentication failed. Status code: 401 Description: InvalidSignature Error: client-error"
GONE = "The messaging entity 'sb://a/changes' could not be found"
GROUP = "The messaging entity 'amqps://a/changes/ConsumerGroups/oncall/Partitions/1' could not be found."


@pytest.mark.parametrize(
    ("config", "error", "advice"),
    [
        (IDENTITY, TimeoutError(), "no answer in 15s: see its address, port 5671"),
        (IDENTITY, ValueError(REFUSED), "the role Azure Event Hubs Data Receiver"),
        (IDENTITY, ValueError("amqp:unauthorized-access"), "the role Azure Event Hubs Data Receiver"),
        (KEY, ValueError(REFUSED), "a key needs Listen on this hub or namespace"),
        (IDENTITY, ValueError(f"Status code: 404 Description: {GONE}"), "there is no such hub: see `fleet.hub`"),
        (IDENTITY, ValueError(f"{GROUP} Error condition: amqp:not-found"), "the hub has no consumer group oncall"),
        (IDENTITY, OSError("Connection refused"), "OSError: Connection refused"),
    ],
)
def test_it_says_what_to_do(config: FleetConfig, error: Exception, advice: str) -> None:
    assert advice in explained(error, config)


def test_it_is_one_line_that_says_nothing_twice() -> None:
    said = explained(ValueError(f"{REFUSED}\n{REFUSED}" * 20), KEY)
    assert "\n" not in said
    assert said.count("InvalidSignature") == 1
    assert "s3cret" not in said


def test_a_checkpoint_store_that_refuses_names_the_role() -> None:
    error = HttpResponseError("Server failed\nContent: <?xml")
    error.status_code = 403
    assert "the role Storage Blob Data Contributor on the container" in store_explained(error)
    assert store_explained(error).endswith("(HttpResponseError: Server failed Content: <?xml)")
    error.error_code = "AuthorizationFailure"  # type: ignore[attr-defined] # as Blob Storage's SDK sets it
    assert store_explained(error).endswith("(AuthorizationFailure)")
    assert store_explained(TimeoutError()) == "TimeoutError: no answer in time"
    assert store_explained(OSError("a\nb")) == "OSError: a b"
