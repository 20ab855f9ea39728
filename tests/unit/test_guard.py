"""What keeps the tests from Azure's own address."""

import socket
import subprocess
import sys

import pytest

ASK = "import socket; socket.create_connection(('169.254.169.254', 80), 1)"


def test_no_test_asks_azure_and_neither_does_a_python_that_it_starts() -> None:
    for connect in (socket.socket.connect, socket.socket.connect_ex):
        with socket.socket() as asking, pytest.raises(AssertionError, match="give it an endpoint of its own"):
            connect(asking, ("169.254.169.254", 80))
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=False)
    assert "give it an endpoint of its own" in done.stderr
