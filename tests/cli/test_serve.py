"""cetane serve as a process: its address, a port that is taken, and SIGTERM in mid-answer."""

import http.client
import json
import os
import signal
import subprocess
import sys
from typing import Any
from urllib.parse import urlsplit

from cetane.bundle import Bundle


def test_a_server_and_its_end(chat_bundle: Bundle, cetane: Any) -> None:
    bundle = chat_bundle
    process = subprocess.Popen(
        [sys.executable, "-m", "cetane", "serve", str(bundle.path), "--port", "0", "--grace", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ.copy(),
    )  # fmt: skip
    try:
        url = urlsplit(process.stdout.readline().strip())  # type: ignore[union-attr]
        refused = cetane("serve", bundle.path, "--port", url.port)
        assert "cannot listen on 127.0.0.1" in refused.error
        connection = http.client.HTTPConnection(url.netloc, timeout=20)
        asked = {"model": "tiny", "prompt": "x", "max_tokens": 900, "stream": True,
                 "logit_bias": {"0": -100}, "n": 16}  # fmt: skip
        connection.request(
            "POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        assert answer.status == 200 and answer.readline().startswith(b"data: ")
        process.send_signal(signal.SIGTERM)
        lines = [line for line in answer.read().split(b"\n\n") if line]
        last = json.loads(lines[-1][6:]) if b"DONE" not in lines[-1] else None
        assert last is None or last["error"]["code"] == "stopping"
        assert process.wait(20) == 0
        _, errors = process.communicate()
        assert "Traceback" not in errors
        assert "stopping: running answers have 1 s; another Ctrl-C ends them" in errors
    finally:
        process.kill()


def test_wrong_use(cetane: Any, tmp_path: Any) -> None:
    assert "no such bundle" in cetane("serve", tmp_path / "none", "--port", 0).error
    assert "65535" in cetane("serve", tmp_path, "--port", 70000).error
