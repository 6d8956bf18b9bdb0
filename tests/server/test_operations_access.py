"""Who may ask, and over what: keys, TLS, Unix sockets, a proxy's path, pages in browsers, documents."""

import socket
import ssl
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from compilerllm.environment import InvalidEnvironment
from compilerllm.errors import InvalidParameter
from compilerllm.server.app import build_app
from compilerllm.server.auth import OPEN_PATHS, InvalidKeyFile, KeyRing
from compilerllm.server.config import ServerConfig
from compilerllm.server.errors import CannotServeTLS, PortInUse
from compilerllm.server.run import bind, check_files
from compilerllm.server.tls import Certificate
from compilerllm.text.tokenizer import Tokenizer
from tests.server.certificates import make_certificate
from tests.server.conftest import Start, serve
from tests.server.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"


def test_every_key_opens_and_nothing_else_does(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of the team\n\nfrom-file\n  second-in-file  \n")
    monkeypatch.setenv("COMPILERLLM_API_KEY", "from-environment")
    live = start({"api_key": ("one", "two"), "api_key_file": str(keys)})
    for key in ("one", "two", "from-file", "second-in-file", "from-environment"):
        for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
            assert live.http.get("/v1/models", headers=headers).status_code == 200, (key, headers)
    for key in ("-", "# of the team", "three", "one two", "on", "onee"):
        for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
            assert live.http.get("/v1/models", headers=headers).status_code == 401, (key, headers)


def test_all_routes_are_guarded_but_for_probes_and_documents(tokenizer: Tokenizer, start: Start) -> None:
    """Also those that are no /v1: what is not known to be harmless is closed."""
    app = build_app(FakeEngine(vocab_size=tokenizer.vocab_size), tokenizer, ServerConfig(), "fake")
    routes = [(r.path, m) for r in app.routes if isinstance(r, APIRoute) for m in r.methods or ()]
    assert len(routes) > 20
    live = start({"api_key": ("secret",)})
    for path, method in [*routes, ("/tokenize", "POST"), ("//v1/models", "GET"), ("/v1/../v1/models", "GET")]:
        answer = live.http.request(method, path.replace("{", "").replace("}", ""))
        assert (answer.status_code == 401) == (path not in OPEN_PATHS), (path, method, answer.status_code)


def test_keys_are_read_anew_and_a_bad_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")
    keys = KeyRing(ServerConfig(api_key=("fixed",), api_key_file=str(file)))
    file.write_text("new\n")
    assert keys.find(b"old") and not keys.find(b"new")
    keys.reload()
    assert keys.find(b"new") and keys.find(b"fixed") and not keys.find(b"old")
    for spoil in (lambda: file.write_text("# nothing\n"), lambda: file.write_bytes(b"\xff"), file.unlink):
        spoil()
        keys.reload()
        assert keys.find(b"new") and "stay as they were" in caplog.messages[-1]
    with pytest.raises(InvalidKeyFile, match="No such file"):
        check_files(ServerConfig(api_key_file=str(file)))


def test_an_empty_key_in_the_environment_does_not_open_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILERLLM_API_KEY", " ")
    with pytest.raises(InvalidEnvironment, match="empty"):
        KeyRing(ServerConfig())


def test_a_key_meant_for_vllm_does_not_leave_the_server_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with pytest.raises(InvalidEnvironment, match="COMPILERLLM_API_KEY"):
        check_files(ServerConfig())
    monkeypatch.setenv("VLLM_PORT", "9000")
    check_files(ServerConfig(api_key=("secret",)))
    assert any("VLLM_PORT is set, but not read here; there is --port" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_key": ("k",)}, False),
        ({"uds": "x"}, False),
    ],
)
def test_an_open_server_says_so(
    options: dict[str, Any], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    check_files(ServerConfig(**options))
    assert any("no API key" in line for line in caplog.messages) == told


def test_logs_call_a_key_by_a_fingerprint() -> None:
    label = KeyRing(ServerConfig(api_key=("secret",))).find(b"secret")
    assert label is not None and len(label) == 8 and "secret" not in label


def test_tls(start: Start, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "server")
    live = start({"ssl_certfile": cert, "ssl_keyfile": key})
    assert live.url.startswith("https://")
    with httpx.Client(base_url=live.url, verify=ssl.create_default_context(cafile=cert)) as http:
        assert http.get("/health").status_code == 200
        answer = http.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
        assert answer.json()["choices"][0]["message"]["content"] == "hi"
    with pytest.raises(httpx.ConnectError):
        httpx.get(live.url + "/health")  # nobody signed it
    with pytest.raises(httpx.HTTPError):
        httpx.get(live.url.replace("https", "http") + "/health")


def test_tls_asks_clients_for_their_certificate(start: Start, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "server")
    mine, my_key = make_certificate(tmp_path, "client")
    live = start(
        {"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": mine, "ssl_cert_reqs": "required"}
    )
    context = ssl.create_default_context(cafile=cert)
    with pytest.raises(httpx.HTTPError):
        httpx.get(live.url + "/health", verify=context)
    context.load_cert_chain(mine, my_key)
    assert httpx.get(live.url + "/health", verify=context).status_code == 200


def test_certificates_that_are_of_no_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cert, key = make_certificate(tmp_path, "one")
    _, other = make_certificate(tmp_path, "other")
    with pytest.raises(CannotServeTLS, match="KEY_VALUES_MISMATCH"):
        check_files(ServerConfig(ssl_certfile=cert, ssl_keyfile=other))
    with pytest.raises(CannotServeTLS, match="No such file"):
        check_files(ServerConfig(ssl_certfile=cert + "x", ssl_keyfile=key))
    with pytest.raises(InvalidParameter, match="--ssl-keyfile must be given with --ssl-certfile"):
        ServerConfig(ssl_keyfile=key)
    with pytest.raises(InvalidParameter, match="--ssl-ca-certs"):
        ServerConfig(ssl_certfile=cert, ssl_cert_reqs="required")
    certificate = Certificate(ServerConfig(ssl_certfile=cert, ssl_keyfile=key))
    Path(key).write_text("nothing")
    certificate.reload()
    assert "stays as it was" in caplog.messages[-1]


def test_a_unix_socket(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(path)
    stale.close()  # as a killed server leaves it
    config = ServerConfig(uds=path)
    with serve(tokenizer, config, FakeEngine(vocab_size=tokenizer.vocab_size)) as live:
        assert live.url == f"unix:{path}" and stat.S_IMODE(Path(path).stat().st_mode) == 0o660
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://x") as http:
            assert http.get("/v1/models").json()["data"][0]["id"] == "fake"
        with pytest.raises(PortInUse, match="already in use"):
            bind(config)
    other = tmp_path / "file"
    other.write_text("keep")
    with pytest.raises(PortInUse):
        bind(ServerConfig(uds=str(other)))
    assert other.read_text() == "keep"


def test_behind_a_proxy_s_path(start: Start) -> None:
    live = start({"root_path": "/llm", "api_key": ("secret",)})
    headers = {"x-api-key": "secret"}
    assert live.http.get("/v1/models", headers=headers).status_code == 200
    assert live.http.get("/v1/models").status_code == 401 and live.http.get("/health").status_code == 200
    assert live.http.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]
    assert "'/llm/openapi.json'" in live.http.get("/docs").text
    for wrong in ("llm", "/llm/", "/"):
        with pytest.raises(InvalidParameter, match="--root-path"):
            ServerConfig(root_path=wrong)


def test_pages_of_allowed_origins_may_ask(start: Start) -> None:
    page = {"Origin": "https://page.example"}
    ask = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    live = start({"allowed_origins": ("https://page.example",), "api_key": ("secret",)})
    preflight = live.http.options(CHAT, headers=ask)  # a browser sends no key with it
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://page.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    refused = live.http.get("/v1/models", headers=page)  # so that the page can read why
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://page.example"
    foreign = live.http.get("/health", headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in foreign.headers
    assert live.http.options(CHAT, headers={**ask, "Origin": "https://other.example"}).status_code == 400
    with pytest.raises(InvalidParameter, match="--allow-credentials"):
        ServerConfig(allowed_origins=("*",), allow_credentials=True)


def test_without_origins_no_page_may(start: Start) -> None:
    answer = start().http.get("/health", headers={"Origin": "https://page.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_documents_can_be_left_out(start: Start) -> None:
    live = start({"disable_fastapi_docs": True})
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert live.http.get(path).status_code == 404
    document = start().http.get("/openapi.json").json()
    body = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"]["messages"]["type"] == "array" and "messages" in body["required"]
    answer = document["paths"]["/load"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert answer["properties"] == {"server_load": {"type": "integer"}}
