"""`transformers serve` with the swapped small model, asked by OpenAI's own client."""

import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress

import pytest
from transformers.utils.import_utils import is_serve_available

import apexk
from apexk import cli
from apexk.bench.session import Session, open_session
from apexk.bench.source import open_model
from apexk.cli.serve import PLAIN_TEMPLATE
from apexk.demo import model as demo

needs_server = pytest.mark.skipif(not is_serve_available(), reason="needs transformers[serving]")
TEXT = "In the beginning God created"
CONTEXT = 64  # shorter than the model's own: a request for more ends there


@pytest.fixture(scope="module")
def wanted():
    """The plain model's greedy answers to TEXT, and to what the chat template makes of it."""
    model, tokenizer = demo.load()
    return [answer(model, tokenizer, text) for text in (TEXT, TEXT + "\n")]


@pytest.fixture(scope="module")
def served():
    session = open_session("demo", apexk.ApexConfig(device="cpu"))
    session.source.tokenizer.chat_template = PLAIN_TEMPLATE
    session.source.model.config.max_position_embeddings = CONTEXT
    with session.handle, ExitStack() as stack:
        yield session, listening(stack, session)


def listening(stack: ExitStack, session: Session, **how) -> int:
    """Port of a server that is there until the stack ends."""
    from apexk.bench.serving import served

    for _ in range(5):
        with suppress(OSError):  # the port was taken between asking for a free one and listening on it
            port = free_port()
            stack.enter_context(served(session, host="localhost", port=port, **how))
            return port
    raise AssertionError("every port was taken")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def code_of(*words):
    try:
        return cli.main(list(words))
    except SystemExit as ended:  # argparse's, for a bad flag
        return ended.code


def answer(model, tokenizer, text):
    return tokenizer.decode(demo.generate(model, tokenizer, [text], 12)[0], skip_special_tokens=True)


@needs_server
def test_openai_client_gets_a_streamed_completion(served, wanted):
    openai = pytest.importorskip("openai")
    session, port = served
    client = openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0)
    before = session.handle.summary()["decode"]["steps"]
    stream = client.completions.create(model="demo", prompt=TEXT, stream=True, max_tokens=12, temperature=0.0)
    pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert sum(map(bool, pieces)) > 3, "it comes in pieces"
    assert "".join(pieces).strip() == wanted[0].strip()
    assert session.handle.summary()["decode"]["steps"] > before, "it ran on apexk"


@needs_server
def test_openai_client_chats(served, wanted):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://localhost:{served[1]}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": TEXT}], stream=True, max_tokens=12, temperature=0.0)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    # the library parses qwen3 answers by that family's own template, and repeats the prompt for one without its marks
    assert text.strip().endswith(wanted[1].strip())


@needs_server
def test_two_clients_at_once(served, wanted):
    _, port = served
    answers = {}

    def work(i):
        body = {"model": "demo", "prompt": TEXT, "max_tokens": 12, "temperature": 0.0}
        request = urllib.request.Request(f"http://localhost:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as reply:
            answers[i] = json.load(reply)["choices"][0]["text"]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[i].strip() for i in range(2)] == [wanted[0].strip()] * 2


@needs_server
def test_a_chat_without_a_template_is_the_askers_error():
    from fastapi import HTTPException

    from apexk.bench.serving import manager

    session = open_session("demo", apexk.ApexConfig(device="cpu"))
    with session.handle:
        processor = manager(session)._load_processor(None)
        with pytest.raises(HTTPException, match="--chat-template") as refused:
            processor.apply_chat_template([{"role": "user", "content": TEXT}])
        assert refused.value.status_code == 400
        assert processor(TEXT)["input_ids"] == session.source.tokenizer(TEXT)["input_ids"]


ENDLESS = [
    ({"max_tokens": 10**9}, 200, "length"), ({"max_tokens": 0}, 400, "max_tokens is 0"), ({"max_tokens": -1}, 400, "max_tokens is -1"),
    ({"prompt": ""}, 400, "prompt of 0 tokens"), ({"prompt": "word " * 400}, 400, f"for a context of {CONTEXT}"),
]  # fmt: skip


@needs_server
@pytest.mark.parametrize(("change", "status", "said"), ENDLESS, ids=lambda v: " ".join(v) if isinstance(v, dict) else "")
def test_a_request_ends_with_the_context(served, change, status, said):
    """The server takes the next request all the same: it runs one at a time, and to its end."""
    _, port = served
    code, told = answered(port, change)
    assert code == status and said in json.dumps(told)
    if status == 200:
        assert told["usage"]["total_tokens"] == CONTEXT
    assert answered(port, {"max_tokens": 1})[0] == 200


def answered(port, change) -> tuple[int, dict]:
    """Status and answer of a request."""
    request = urllib.request.Request(f"http://localhost:{port}/v1/completions", json.dumps({"model": "demo", "prompt": TEXT, "temperature": 0.0} | change).encode(),
                                     {"Content-Type": "application/json"})  # fmt: skip
    try:
        with urllib.request.urlopen(request, timeout=300) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def ask(port, stream) -> socket.socket:
    """A connection that has asked for more tokens than the context has."""
    body = json.dumps({"model": "demo", "prompt": TEXT, "temperature": 0.0, "max_tokens": 10**6, "stream": stream}).encode()
    client = socket.create_connection(("localhost", port), timeout=120)
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    return client


class Steps:
    """Passes of a model; in the third one `then(its context)` is called, and passes end when that does."""

    def __init__(self, model, then):
        self.count, self.then = 0, then
        self.hook = model.register_forward_pre_hook(self.step)

    def step(self, *_):
        self.count += 1
        if self.count == 3:
            self.then()


INTERRUPTED = """
import socket, sys
from apexk.bench import serving, session
from apexk.cli import main
real, port = session.open_session, sys.argv[1]
serving.GRACE_S = 600  # however slow the machine

def opened(*args, **how):
    found, passes = real(*args, **how), []
    def step(*_):
        passes.append(1)
        print("pass", flush=True)
        if len(passes) == 3:
            print("third", flush=True)
            try:
                while True: socket.create_connection(("localhost", int(port))).close()
            except OSError: pass  # it takes no more: the signal is heard
    found.source.model.register_forward_pre_hook(step)
    return found

session.open_session = opened
sys.exit(main(["serve", "--device", "cpu", "--port", *sys.argv[1:]]))
"""


@pytest.mark.slow
@needs_server
@pytest.mark.parametrize(("number", "stream", "more"), [
    (signal.SIGINT, True, []), (signal.SIGTERM, True, []), (signal.SIGTERM, False, []), (signal.SIGINT, True, ["--continuous-batching"]), (signal.SIGTERM, False, ["--continuous-batching"]),
], ids=str)  # fmt: skip
def test_a_signal_ends_the_server_at_the_next_token(number, stream, more):
    """With a request open, in whose third pass the signal comes: the client gets an end of its answer, and neither a thread nor a process is left,
    which the process would wait for or the pipes be held open by. Continuous batching has a pass on the way by then."""
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED, str(port), *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            while "startup complete" not in (line := server.stderr.readline()):
                assert line, "it ended"
            client = ask_once_it_listens(port, stream)
            while "third" not in (line := server.stdout.readline()):
                assert line, "it ended"
            server.send_signal(number)
            said, errors = server.communicate(timeout=300)
            answer = b""
            while part := client.recv(65536):
                answer += part
        finally:
            server.kill()
    assert server.returncode == 128 + number and "Traceback" not in errors and "ERROR:" not in errors, errors
    assert said.count("pass") <= (2 if more else 0)
    if stream or not more:
        assert b'"usage"' in answer and b'"completion_tokens":' in answer
        assert more or b'"completion_tokens":3' in answer
    else:
        assert answer.startswith(b"HTTP/1.1 503")


def ask_once_it_listens(port, stream):
    while True:
        with suppress(ConnectionRefusedError):
            return ask(port, stream)


@needs_server
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_continuous_batching_drops_a_request_whose_client_has_left(stream, monkeypatch):
    """It would go on to the end of the context, which is 60 passes away; what the next request gets is what it asked for."""
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    dropped, real = threading.Event(), ContinuousBatchingManager.cancel_request
    monkeypatch.setattr(ContinuousBatchingManager, "cancel_request", lambda *args: (real(*args), dropped.set()))
    session = open_session("demo", apexk.ApexConfig(device="cpu"))
    session.source.model.config.max_position_embeddings = CONTEXT
    with session.handle, ExitStack() as stack:
        port = listening(stack, session, continuous_batching=True)
        client = ask(port, stream)
        heard = []
        steps = Steps(session.source.model, lambda: (client.close(), heard.append(dropped.wait(120))))
        assert dropped.wait(120)
        for wanted, status in ((2, 200), (10**6, 200), (0, 400)):
            code, told = answered(port, {"max_tokens": wanted})
            assert code == status
            assert code != 200 or told["usage"]["completion_tokens"] == min(wanted, CONTEXT - told["usage"]["prompt_tokens"])
        steps.hook.remove()
    assert heard == [True] and steps.count < 3 + 4 + 2 + CONTEXT


@needs_server
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_request_ends_at_the_next_token_once_its_client_has_left(served, stream):
    """The pass in which it leaves is the last one: what it would have got is 60 tokens. The next request is answered."""
    from apexk.bench.requests import LEFT

    session, port = served
    client = ask(port, stream)
    ended = threading.Event()
    left = []

    def leave():
        client.close()
        left.append(LEFT.get().wait(120))

    steps = Steps(session.source.model, leave)
    real = session.source.model.generate

    def generate(**how):
        try:
            return real(**how)
        finally:
            ended.set()

    session.source.model.generate = generate
    try:
        assert ended.wait(120)
    finally:
        session.source.model.generate = real
        steps.hook.remove()
    assert left == [True] and steps.count == 3
    with urllib.request.urlopen(urllib.request.Request(f"http://localhost:{port}/v1/completions", json.dumps({"model": "demo", "prompt": TEXT, "max_tokens": 2}).encode(),
                                                       {"Content-Type": "application/json"}), timeout=120) as reply:  # fmt: skip
        assert json.load(reply)["usage"]["completion_tokens"] == 2


def test_a_model_without_a_tokenizer_is_refused():
    from apexk.bench.serving import served

    source = open_model("demo")
    source.tokenizer = None
    with apexk.swap(source.model, apexk.ApexConfig(device="cpu")) as handle:
        with pytest.raises(ValueError, match="tokenizer"), served(Session(source, handle), host="localhost", port=1):
            pass


@pytest.mark.parametrize(("words", "code", "said"), [(["--port", "0"], 2, "port"), (["--policy", "best"], 2, "apex"), (["--chat-template", "/none.jinja"], 2, "none.jinja")], ids=str)
def test_bad_words(words, code, said, capsys):
    assert code_of("serve", *words) == code
    assert said in capsys.readouterr().err


@pytest.mark.skipif(is_serve_available(), reason="the server's packages are here")
def test_missing_packages_are_named(capsys):
    assert cli.main(["serve"]) == 3
    assert "transformers[serving]" in capsys.readouterr().err
